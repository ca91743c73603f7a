"""The manifest: every process loads the same plugins, once."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import ATTENTION, Site, attention_class, attention_source, load_in_child

from jackfield.config.plugins import PluginSettings
from jackfield.errors import PluginError
from jackfield.interfaces import HOOK_GROUP
from jackfield.registry import Manifest, PluginRef, PluginState, Registry

COUNTING = "import os\nwith open({path!r}, 'a') as file:\n    file.write(f'{{os.getpid()}}\\n')\n"


def manifest_of(site: Site) -> Manifest:
    registry = Registry.discover(entry_points=site.points())
    return registry.manifest(registry.refs(), for_spawn=True)


def test_manifest_is_json_and_independent_of_order(site: Site) -> None:
    site.attention("rocket", version="1.2")
    site.attention("comet")
    registry = Registry.discover(entry_points=site.points())
    manifest = registry.manifest(registry.refs())
    assert registry.manifest([*reversed(registry.refs()), *registry.refs()]) == manifest
    data = json.loads(json.dumps(manifest.to_dict()))
    assert data["plugins"][1] == {
        "family": "attention_backends",
        "name": "rocket",
        "distribution": "acme-rocket",
        "version": "1.2",
        "target": "fake_rocket_acme_rocket:Backend",
    }
    assert len(data["digest"]) == 64 and Manifest.from_dict(data) == manifest


def test_exactly_the_manifest_is_loaded(site: Site) -> None:
    site.attention("rocket")
    manifest = manifest_of(site)
    site.attention("other")
    registry = Registry.from_manifest(manifest)
    assert [(ref.name, ref.state) for ref in registry.refs()] == [("rocket", PluginState.LOADED)]
    assert registry.frozen and site.imported() == ["fake_rocket_acme_rocket"]


def test_changed_manifest_is_refused(site: Site) -> None:
    site.attention("rocket")
    data = manifest_of(site).to_dict()
    data["plugins"][0]["version"] = "6.6"
    with pytest.raises(PluginError, match="the plugin manifest was changed"):
        Registry.from_manifest(data)


def test_other_installed_versions_are_all_listed(site: Site) -> None:
    for name in ("comet", "moved", "rocket"):
        site.attention(name)
    manifest = manifest_of(site)
    comet, moved, rocket = site.folders
    (comet / "acme_comet-1.0.dist-info" / "METADATA").write_text("Name: acme-comet\nVersion: 1.1\n", encoding="utf-8")
    points = f"[{ATTENTION}]\nmoved = elsewhere:Backend\n"
    (moved / "acme_moved-1.0.dist-info" / "entry_points.txt").write_text(points, encoding="utf-8")
    (rocket / "acme_rocket-1.0.dist-info").rename(rocket / "gone")
    with pytest.raises(PluginError) as caught:
        Registry.from_manifest(manifest)
    assert caught.value.message.splitlines() == [
        "installed plugins differ from the manifest:",
        "  attention_backends.comet: acme-comet 1.0 expected, 1.1 installed",
        "  attention_backends.moved: fake_moved_acme_moved:Backend expected, elsewhere:Backend declared",
        "  attention_backends.rocket: acme-rocket 1.0 is not installed",
    ]


def test_plugin_that_does_not_load_in_the_child_is_an_error(site: Site) -> None:
    site.add("acme", {ATTENTION: {"bad": "fake_bad:Backend"}}, {"fake_bad": "raise RuntimeError('boom')"})
    with pytest.raises(PluginError, match="RuntimeError: boom"):
        Registry.from_manifest(manifest_of(site))


def test_hooks_travel_and_unknown_families_do_not(site: Site) -> None:
    source = "from jackfield.interfaces import hookimpl\n@hookimpl\ndef engine_started(engine): pass\n"
    site.add("acme", {HOOK_GROUP: {"audit": "fake_audit"}}, {"fake_audit": source})
    (ref,) = Registry.from_manifest(manifest_of(site)).refs("hooks")
    assert ref.load_object() is sys.modules["fake_audit"]
    alien = PluginRef("teleporters", "beam", "acme", "1.0", "fake_beam:Beam")
    with pytest.raises(PluginError) as caught:
        Registry.from_manifest(Manifest.of([alien]))
    assert caught.value.message.splitlines()[1:] == ["  teleporters.beam: this core has no family 'teleporters'"]


def test_options_reach_the_child(site: Site) -> None:
    site.attention("rocket", "options = {'splits': Option(int, 4)}")
    registry = Registry.from_manifest(manifest_of(site), PluginSettings(options={"rocket": {"splits": 8}}))
    assert registry.settings(registry.refs()[0])["splits"] == 8


def test_in_process_plugins_cannot_travel() -> None:
    registry = Registry()
    registry.register(attention_class("rocket"))
    with pytest.raises(PluginError) as caught:
        registry.manifest(registry.refs(), for_spawn=True)
    assert caught.value.message == "plugins registered in this process cannot be used in worker processes: rocket"
    assert caught.value.remedy == "register through an entry point of an installed distribution"
    with pytest.raises(PluginError, match="cannot be used in worker processes"):
        Registry.from_manifest(registry.manifest(registry.refs()))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_each_process_loads_once(site: Site, tmp_path: Path, method: str) -> None:
    log = tmp_path / "imports"
    source = COUNTING.format(path=str(log)) + attention_source("rocket")
    site.add("acme", {ATTENTION: {"rocket": "fake_counting:Backend"}}, {"fake_counting": source})
    manifest = manifest_of(site)
    Registry.from_manifest(manifest)
    context: Any = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    child = context.Process(target=load_in_child, args=(manifest.to_dict(), results))
    child.start()
    child.join(60)
    pid, same, digest, states = results.get()
    assert (pid, same, digest, states) == (child.pid, True, manifest.digest, ["loaded"])
    imports = log.read_text(encoding="utf-8").split()
    expected = {"spawn": [os.getpid(), pid], "fork": [os.getpid()]}[method]
    assert imports == [str(process) for process in expected]
