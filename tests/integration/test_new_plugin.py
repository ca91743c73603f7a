"""``jackfield new-plugin``: what it writes installs, is clean, and passes its own tests at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jackfield.cli import main
from jackfield.cli.new_plugin import HOOKS, TEMPLATES, USAGE, WORDS, family_of
from jackfield.interfaces import FAMILIES
from jackfield.testing.packaging import pip

ALL = (*FAMILIES, HOOKS)
QUICK = (HOOKS,)
NAME = "acme-rocket"


def make(family: str, folder: Path, name: str = NAME) -> Path:
    """Write a plugin and install it into a folder of its own; returns that folder."""
    project, site = folder / name, folder / "site"
    assert main(["new-plugin", family, name, "--output", str(project)]) == 0
    pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site), str(project))
    return site


def run(project: Path, site: Path, *arguments: str) -> str:
    """Run a module of Python in the project, with the plugin installed; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_every_family_has_a_template() -> None:
    folders = {path.name for path in TEMPLATES.iterdir() if path.is_dir()}
    assert folders == {*ALL, "common"} and USAGE.keys() == set(ALL)
    assert {family_of(word) for word in WORDS} <= set(ALL)


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in QUICK else [pytest.mark.slow]) for f in ALL])
def test_its_own_tests_pass_at_once(family: str, tmp_path: Path) -> None:
    site = make(family, tmp_path)
    told = run(tmp_path / NAME, site, "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests")
    assert " passed" in told and "failed" not in told and "skipped" not in told


@pytest.mark.parametrize("family", ALL)
def test_what_it_writes_is_clean(family: str, tmp_path: Path) -> None:
    project = tmp_path / NAME
    assert main(["new-plugin", family, NAME, "--output", str(project)]) == 0
    for tool in (["check", "--select", "E,F,W,I,B,UP"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *tool, "--no-cache", str(project)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    texts = {path: path.read_text() for path in project.rglob("*") if path.is_file()}
    assert not [path for path, text in texts.items() if "@package@" in text or "@plugin@" in text or "@Class@" in text]
    assert (project / "src" / "acme_rocket" / "py.typed").exists()
    assert (project / ".github" / "workflows" / "tests.yml").exists()


@pytest.mark.slow
def test_what_it_writes_is_typed(tmp_path: Path) -> None:
    for family in ALL:
        name = f"acme-{family.replace('_', '-')}"
        assert main(["new-plugin", family, name, "--output", str(tmp_path / name)]) == 0
    folders = [str(path) for name in ("src", "tests") for path in sorted(tmp_path.glob(f"*/{name}"))]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(path for path in folders if path.endswith("src"))}
    command = [sys.executable, "-m", "mypy", "--strict", "--explicit-package-bases", "--cache-dir", str(tmp_path / "c")]
    done = subprocess.run(
        [*command, *folders], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_a_minimal_attention_plugin_has_at_most_100_lines(tmp_path: Path) -> None:
    assert main(["new-plugin", "attention", NAME, "--output", str(tmp_path / NAME)]) == 0
    lines = [len(path.read_text().splitlines()) for path in (tmp_path / NAME / "src").rglob("*.py")]
    assert sum(lines) <= 100


@pytest.mark.slow
def test_it_is_built_installed_used_and_gone(tmp_path: Path) -> None:
    site = make("scheduling", tmp_path)
    told = run(tmp_path / NAME, site, "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow", "tests")
    assert "3 passed" in told


REFUSED = {
    "atention acme-rocket": ("there is no family 'atention'", "did you mean 'attention'"),
    "attention AcmeRocket": ("'AcmeRocket' cannot be a distribution's name", "acme-rocket"),
    "attention torch": ("a package 'torch' is installed already", "choose another name"),
    "attention class": ("'class' cannot be a distribution's name", "acme-rocket"),
}


@pytest.mark.parametrize("line", list(REFUSED))
def test_refusals(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", *line.split(), "--output", str(tmp_path / "new")]) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in REFUSED[line])
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["new-plugin", "hook", NAME, "--output", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
