"""``jackfield doctor`` finds what is wrong with an installation, and tells no secrets."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import ATTENTION, Site

from jackfield.cli import doctor, main
from jackfield.cli.doctor import FAULT, NOTE, OK, Finding, examine, tidy


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.config.environment.process_environment", dict)


def found(section: str, level: str) -> list[Finding]:
    findings = getattr(doctor, section)(doctor.Installation())
    return [finding for finding in findings if finding.level == level]


def test_this_installation_is_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert [finding.line() for finding in examine() if finding.level == FAULT and finding.section != "metadata"] == []
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert {one["section"] for one in findings} == {
        *("versions", "tools", "devices", "metadata", "shadows", "owners", "plugins", "environment"),
    }
    assert any(one["text"].startswith("torch ") for one in findings)


def test_a_name_with_two_owners(site: Site) -> None:
    for owner in ("acme", "zenith"):
        site.attention("rocket", distribution=owner)
    (finding,) = found("owners", FAULT)
    assert finding.text == "attention_backends.rocket is claimed by acme 1.0 and zenith 1.0"
    assert finding.remedy.startswith("set plugins.override")


def test_the_program_has_one_owner(site: Site) -> None:
    site.add("jackfield-fork", {"console_scripts": {"jackfield": "fork:main"}, ATTENTION: {"x": "fork:X"}})
    assert [f.text for f in found("owners", FAULT)] == [
        "the program 'jackfield' belongs to jackfield-fork too: the last one that was installed runs"
    ]


def test_a_plugin_that_does_not_load(site: Site) -> None:
    site.add("acme", {ATTENTION: {"bad": "fake_bad:Backend"}}, {"fake_bad": "raise RuntimeError('boom')"})
    (finding,) = found("plugins", FAULT)
    assert finding.text == "plugin bad (acme 1.0) could not be loaded: RuntimeError: boom"


def test_what_one_more_package_would_bring(site: Site) -> None:
    site.attention("rocket", "requires = ('rocket-kernels>=2',)")
    notes = {f.text: f.remedy for f in found("plugins", NOTE)}
    text = "attention_backends.rocket (acme-rocket 1.0) would be a candidate: rocket-kernels>=2 is not installed"
    assert notes[text] == "pip install 'rocket-kernels>=2'"


def test_metadata_that_is_there_twice(site: Site) -> None:
    for version in ("0.9", "1.0"):
        site.add("acme-rocket", {ATTENTION: {"rocket": "m:Rocket"}}, version=version)
    text = next(f.text for f in found("metadata", FAULT) if "acme-rocket" in f.text)
    assert "metadata in 2 places" in text and "acme_rocket-0.9.dist-info" in text


def test_entry_points_that_are_older_than_their_source(site: Site, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    table = f'[project]\nname = "acme"\n[project.entry-points."{ATTENTION}"]\nrocket = "m:Rocket"\nnew = "m:New"\n'
    (source / "pyproject.toml").write_text(table)
    folder = site.add("acme", {ATTENTION: {"rocket": "m:Rocket"}})
    told = {"url": source.as_uri(), "dir_info": {"editable": True}}
    (folder / "acme-1.0.dist-info" / "direct_url.json").write_text(json.dumps(told))
    finding = next(f for f in found("metadata", FAULT) if "acme" in f.text)
    assert finding.text == f"'acme' was installed before its pyproject.toml changed: {ATTENTION}: new"
    assert finding.remedy == f"pip install --no-deps -e {source}"


def test_a_folder_that_hides_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    (finding,) = found("shadows", FAULT)
    assert finding.text.startswith(f"'numpy' is imported from {tmp_path / 'numpy'} and not from ")


def test_missing_tools_say_who_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda program: None)
    texts = [finding.text for finding in found("tools", NOTE)]
    assert "C compiler: none of cc, gcc, clang is on PATH" in texts


def test_keys_and_homes_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"JACKFIELD_API_KEY": "sk-1", "JACKFIELD_CACHE__BLOCK_SIZE": "32", "JACKFIELD_CASHE": "1"}
    monkeypatch.setattr("jackfield.config.environment.process_environment", lambda: variables)
    findings = list(doctor.environment(doctor.Installation()))
    texts = [finding.text for finding in findings]
    assert "JACKFIELD_API_KEY = (not shown)" in texts and "JACKFIELD_CACHE__BLOCK_SIZE = '32'" in texts
    assert not any("sk-1" in text for text in texts)
    assert [f.level for f in findings].count(FAULT) == 1
    home = str(Path.home())
    assert tidy(Finding("a", OK, f"{home}/x", f"cd {home}")) == Finding("a", OK, "~/x", "cd ~")


def test_a_look_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(installed: object) -> Iterator[Finding]:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "tools", broken)
    assert Finding("broken", FAULT, "could not be looked at: RuntimeError: boom") in list(examine())
