"""The plugin lock: what differs is named before anything is imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import ATTENTION, Site, attention_source

from jackfield.cli import main
from jackfield.config.plugins import PluginSettings
from jackfield.errors import ConfigError, PluginError
from jackfield.registry import PluginLock, Registry


@pytest.fixture
def lock(site: Site, tmp_path: Path) -> Path:
    site.attention("rocket", version="1.2")
    path = tmp_path / "plugins.lock"
    path.write_text(PluginLock.of(refs(site)).text())
    return path


def refs(site: Site, **rules: object) -> tuple[object, ...]:
    return Registry.discover(PluginSettings(**rules), site.points()).refs()  # type: ignore[arg-type]


def test_what_was_locked_starts(site: Site, lock: Path) -> None:
    assert [ref.name for ref in refs(site, lock=str(lock))] == ["rocket"]  # type: ignore[attr-defined]
    (entry,) = PluginLock.read(lock).distributions
    assert (entry.name, entry.version, entry.plugins) == ("acme-rocket", "1.2", ("attention_backends.rocket",))
    assert len(entry.sha256) == 64 and site.imported() == []


def change_version(site: Site) -> None:
    (info,) = site.folders[0].glob("*.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-rocket\nVersion: 1.3\n")


def change_file(site: Site) -> None:
    (module,) = site.folders[0].glob("*.py")
    module.write_text(attention_source("rocket") + "# not what it was\n")


def add_plugin(site: Site) -> None:
    (info,) = site.folders[0].glob("*.dist-info")
    with (info / "entry_points.txt").open("a") as file:
        file.write("\nanother = m:Another\n")


def remove(site: Site) -> None:
    (info,) = site.folders[0].glob("*.dist-info")
    (info / "entry_points.txt").write_text("")


CHANGES = {
    "another version": (change_version, "acme-rocket: 1.2 is locked, 1.3 is installed"),
    "another content": (change_file, "acme-rocket 1.2: files differ: "),
    "another plugin": (add_plugin, "acme-rocket 1.2: it declares other plugins: attention_backends.another"),
    "gone": (remove, "acme-rocket 1.2 (attention_backends.rocket) is not installed"),
    "a stranger": (
        lambda site: site.attention("comet"),
        "acme-comet 1.0 (attention_backends.comet) is installed and not in the lock",
    ),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_differs_is_named(site: Site, lock: Path, change: str) -> None:
    work, text = CHANGES[change]
    work(site)
    with pytest.raises(PluginError) as caught:
        refs(site, lock=str(lock))
    error = caught.value
    assert text in error.message
    assert (error.field, error.value) == ("plugins.lock", str(lock))
    assert error.remedy == "install what the lock names, or write it anew with: jackfield plugins lock"
    assert site.imported() == []


def test_what_is_kept_out_needs_no_lock(site: Site, lock: Path) -> None:
    site.attention("comet")
    assert len(refs(site, lock=str(lock), disable=("comet",))) == 2
    assert len(refs(site, lock=str(lock), allow=("rocket",))) == 2


@pytest.mark.parametrize("text", [None, "", "[]", '{"version": 9}', '{"version": 1, "distributions": [{}]}'])
def test_a_file_that_is_no_lock(site: Site, tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "broken.lock"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="the plugin lock cannot be read") as caught:
        refs(site, lock=str(path))
    assert caught.value.field == "plugins.lock"


def test_the_command_line_writes_and_checks(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.add("acme", {ATTENTION: {"rocket": "fake_r:Backend"}}, {"fake_r": attention_source("rocket")})
    path = tmp_path / "a.lock"
    assert main(["plugins", "lock", "--output", str(path)]) == 0
    assert "distributions" in capsys.readouterr().out
    assert main(["plugins", "--plugins.lock", str(path)]) == 0
    capsys.readouterr()
    change_file(site)
    assert main(["plugins", "--plugins.lock", str(path)]) == 2
    assert "acme 1.0: files differ" in capsys.readouterr().err
    assert main(["plugins", "lock", "--output", str(path), "--plugins.lock", str(path)]) == 0, "it can be written anew"
    assert main(["plugins", "--plugins.lock", str(path)]) == 0
