"""Discovery: what is installed, read from metadata without importing a plugin."""

from __future__ import annotations

import random
from importlib.metadata import EntryPoint

import pytest
from fakes import ATTENTION, Site, attention_source

from jackfield.config.plugins import PluginSettings
from jackfield.errors import ConfigError, PluginError
from jackfield.interfaces.families import FAMILIES
from jackfield.registry import PluginState, Registry

OFFERED = ".".join(map(str, FAMILIES["attention_backends"].version))


def test_nothing_is_imported_and_owner_is_known(site: Site) -> None:
    site.attention("rocket", version="1.2")
    slow = "import time\ntime.sleep(600)\n"
    site.add("acme-slow", {ATTENTION: {"slow": "fake_slow:Backend"}}, {"fake_slow": slow})
    refs = Registry.discover(entry_points=site.points()).refs()
    assert [(ref.name, ref.owner, ref.state) for ref in refs] == [
        ("rocket", "acme-rocket 1.2", PluginState.DISCOVERED),
        ("slow", "acme-slow 1.0", PluginState.DISCOVERED),
    ]
    assert site.imported() == []


def test_installed_distributions_are_found(site: Site) -> None:
    site.attention("rocket")
    names = {ref.name for ref in Registry.discover().refs("attention_backends")}
    assert {"rocket", "torch_sdpa"} <= names


def test_class_is_loaded_once(site: Site) -> None:
    site.attention("rocket")
    ref = Registry.discover(entry_points=site.points()).get("attention_backends", "rocket")
    assert ref.load() is ref.require()
    assert ref.state is PluginState.LOADED and site.imported() == ["fake_rocket_acme_rocket"]


def test_other_major_is_refused_without_import(site: Site) -> None:
    points = {"jackfield.attention_backends.v2": {"rocket": "fake_v2:Backend"}}
    site.add("acme", points, {"fake_v2": "raise AssertionError"}, version="1.2")
    ref = Registry.discover(entry_points=site.points()).refs()[0]
    assert ref.load() is None and site.imported() == []
    assert ref.error is not None and (ref.error.code, ref.stage) == ("api_version", "api")
    assert ref.sentence() == (
        f"plugin rocket (acme 1.2) could not be loaded: needs attention_backends API 2, this core offers {OFFERED}"
    )


def test_unknown_family_and_unknown_group(site: Site) -> None:
    points = {"jackfield.teleporters.v1": {"a": "m:A"}, "jackfield.attention_backend": {"b": "m:B"}}
    site.add("acme", points)
    errors = {ref.name: ref.error for ref in Registry.discover(entry_points=site.points()).refs()}
    assert errors["a"] is not None and errors["a"].text == "needs teleporters API 1, this core offers none"
    assert errors["b"] is not None and errors["b"].text == "unknown entry-point group 'jackfield.attention_backend'"
    assert "jackfield.attention_backends.v1" in errors["b"].remedy


def test_newer_minor_is_refused(site: Site) -> None:
    newer = FAMILIES["attention_backends"].version[1] + 1
    site.attention("rocket", f"api = (1, {newer})")
    ref = Registry.discover(entry_points=site.points()).refs()[0]
    assert ref.load() is None
    assert ref.error is not None and ref.error.code == "api_version"
    assert ref.error.text == f"needs attention_backends API 1.{newer}, this core offers {OFFERED}"


@pytest.mark.parametrize(
    ("source", "stage", "text"),
    [
        ("import nowhere_to_be_found", "import", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("raise RuntimeError('boom')", "import", "RuntimeError: boom"),
        ("raise SystemExit(3)", "import", "SystemExit: 3"),
        ("x = 1", "attribute", "AttributeError: module 'fake_bad' has no attribute 'Backend'"),
        ("Backend = 7", "class", "7 is not a subclass of AttentionBackend"),
        (
            attention_source("other"),
            "class",
            "the class calls itself 'other', its entry point 'bad'; they must be equal",
        ),
        (attention_source("bad", "kinds = 'full'"), "class", "kinds is 'full', not a set of strings"),
        (
            attention_source("bad", "requires = 'numpy'"),
            "class",
            "requires is 'numpy', not a tuple of requirement strings",
        ),
        (attention_source("bad", "options = {'a': 1}"), "class", "options is not a mapping of names to Option"),
        (attention_source("bad", "api = 1"), "class", "api is 1, not (major, minor)"),
    ],
)
def test_each_failure_keeps_its_stage_and_message(site: Site, source: str, stage: str, text: str) -> None:
    site.add("acme", {ATTENTION: {"bad": "fake_bad:Backend"}}, {"fake_bad": source})
    ref = Registry.discover(entry_points=site.points()).refs()[0]
    assert ref.load() is None and ref.state is PluginState.FAILED
    assert ref.error is not None
    assert (ref.error.code, ref.error.stage, ref.error.text) == ("load_failed", stage, text)
    with pytest.raises(PluginError, match=r"plugin bad \(acme 1.0\) could not be loaded") as caught:
        ref.require()
    assert text in caught.value.message


def test_traceback_of_the_plugin_is_kept(site: Site) -> None:
    site.add("acme", {ATTENTION: {"bad": "fake_bad:Backend"}}, {"fake_bad": "raise RuntimeError('boom')"})
    ref = Registry.discover(entry_points=site.points()).refs()[0]
    ref.load()
    assert ref.error is not None and "fake_bad.py" in ref.error.traceback


def test_bad_requirement_string(site: Site) -> None:
    site.attention("rocket", "requires = ('not a requirement!',)")
    ref = Registry.discover(entry_points=site.points()).refs()[0]
    assert ref.load() is None and ref.error is not None
    assert ref.error.text.startswith("requires holds 'not a requirement!': ")


def test_malformed_entry_point_is_a_failure() -> None:
    ref = Registry.discover(entry_points=[EntryPoint("rocket", "not a target", ATTENTION)]).refs()[0]
    assert ref.load() is None and ref.error is not None and ref.error.stage == "import"
    assert ref.owner == "unknown"


def test_broken_metadata_does_not_stop_discovery(site: Site) -> None:
    site.attention("rocket")
    folder = site.add("broken", {ATTENTION: {"x": "m:X"}})
    (folder / "broken-1.0.dist-info" / "METADATA").write_text("Version: 1\n", encoding="utf-8")
    refs = Registry.discover().refs()
    failed = [ref for ref in refs if ref.family == "unknown"]
    assert [(ref.name, ref.stage) for ref in failed] == [("broken-1.0.dist-info", "metadata")]
    assert any(ref.name == "rocket" for ref in refs)


def test_order_is_by_name_and_distribution_not_by_path(site: Site) -> None:
    for name in ("zeta", "alpha", "mid"):
        site.attention(name)
    points = site.points()
    random.Random(3).shuffle(points)
    assert [ref.name for ref in Registry.discover(entry_points=points).refs()] == ["alpha", "mid", "zeta"]


def test_stale_metadata_is_named_with_both_paths(site: Site) -> None:
    stale = site.add("acme-rocket", {"jackfield.drafters.v1": {"old": "m:Old"}}, version="0.9", suffix="egg-info")
    fresh = site.add("acme-rocket", {ATTENTION: {"rocket": "m:Rocket"}}, version="1.0")
    registry = Registry.discover()
    paths = registry.copies["acme-rocket"]
    assert paths == (str(stale / "acme_rocket-0.9.egg-info"), str(fresh / "acme_rocket-1.0.dist-info"))
    assert not [ref for ref in registry.refs() if ref.name == "rocket"]
    with pytest.raises(ConfigError) as caught:
        Registry.discover(PluginSettings(required=("rocket",)))
    assert all(path in caught.value.remedy for path in paths)


def test_get_names_close_matches(site: Site) -> None:
    site.attention("rocket")
    with pytest.raises(PluginError) as caught:
        Registry.discover(entry_points=site.points()).get("attention_backends", "rockt")
    assert caught.value.message == "there is no plugin 'rockt' in attention_backends"
    assert caught.value.remedy == "did you mean 'rocket'? installed: rocket"
