"""The user's rules: disable, allow, required, override, strict; and duplicate names."""

from __future__ import annotations

import pytest
from fakes import ATTENTION, Site, attention_source

from jackfield.config.plugins import PluginSettings
from jackfield.errors import ConfigError, PluginError
from jackfield.registry import PluginRef, PluginState, Registry


def discover(site: Site, settings: PluginSettings | None = None) -> Registry:
    return Registry.discover(settings, site.points())


def by_owner(registry: Registry) -> dict[str, PluginRef]:
    return {ref.distribution: ref for ref in registry.refs()}


def test_duplicate_name_fails_both_and_names_the_fix(site: Site) -> None:
    site.attention("rocket", distribution="zeus", version="2.0")
    site.attention("rocket", distribution="acme")
    for ref in discover(site).refs():
        assert ref.state is PluginState.FAILED and ref.load() is None
        assert ref.error is not None and ref.error.code == "duplicate_name"
        assert ref.error.text == "attention_backends.rocket is claimed by acme 1.0 and zeus 2.0"
        assert ref.error.remedy == (
            "set plugins.override: {attention_backends.rocket: acme} "
            "or plugins.override: {attention_backends.rocket: zeus}"
        )
    assert site.imported() == []


@pytest.mark.parametrize(("owner", "loser"), [("acme", "zeus"), ("zeus", "acme")])
def test_override_settles_a_duplicate(site: Site, owner: str, loser: str) -> None:
    site.attention("rocket", distribution="zeus")
    site.attention("rocket", distribution="acme")
    registry = discover(site, PluginSettings(override={"attention_backends.rocket": owner}))
    assert registry.get("attention_backends", "rocket").distribution == owner
    refs = by_owner(registry)
    assert refs[owner].load() is not None and refs[loser].load() is None
    assert refs[loser].sentence() == (
        f"plugin rocket ({loser} 1.0) is disabled: plugins.override gives attention_backends.rocket to '{owner}'"
    )
    assert site.imported() == [f"fake_rocket_{owner}"]


def test_disabling_one_owner_settles_it_too(site: Site) -> None:
    site.attention("rocket", distribution="zeus")
    site.attention("rocket", distribution="acme")
    refs = by_owner(discover(site, PluginSettings(disable=("attention_backends.rocket@zeus",))))
    assert refs["acme"].load() is not None and refs["zeus"].state is PluginState.DISABLED


def test_one_distribution_that_declares_a_name_twice(site: Site) -> None:
    site.add("acme", {ATTENTION: {"rocket": "a:A"}})
    info = site.folders[0] / "acme-1.0.dist-info" / "entry_points.txt"
    info.write_text(f"[{ATTENTION}]\nrocket = a:A\nrocket = b:B\n", encoding="utf-8")
    refs = discover(site).refs()
    assert [ref.error and ref.error.text for ref in refs] == [
        "acme declares attention_backends.rocket more than once: a:A and b:B"
    ] * 2


def test_name_in_another_major_is_no_duplicate(site: Site) -> None:
    points = {"jackfield.attention_backends.v2": {"rocket": "m:New"}, ATTENTION: {"rocket": "fake_both:Backend"}}
    site.add("acme", points, {"fake_both": attention_source("rocket")})
    assert discover(site).get("attention_backends", "rocket").load() is not None


def test_disabled_is_never_imported(site: Site) -> None:
    site.attention("rocket")
    registry = discover(site, PluginSettings(disable=("rocket",)))
    assert [row.code for row in registry.rows()] == ["disabled"]
    assert registry.rows()[0].reason == "plugin rocket (acme-rocket 1.0) is disabled: plugins.disable names it"
    assert site.imported() == []


def test_allow_keeps_others_out_but_not_the_project(site: Site) -> None:
    site.attention("rocket")
    site.attention("comet")
    site.attention("own", distribution="jackfield", version="0")
    registry = discover(site, PluginSettings(allow=("comet",)))
    assert {ref.name: str(ref.state) for ref in registry.refs()} == {
        "comet": "discovered",
        "own": "discovered",
        "rocket": "disabled",
    }


def test_unknown_names_are_listed_together(site: Site) -> None:
    site.attention("rocket")
    settings = PluginSettings(disable=("rockt",), allow=("nope",), required=("rocket",), override={"x.y": "acme"})
    with pytest.raises(ConfigError) as caught:
        discover(site, settings)
    assert caught.value.message == (
        "no such plugin: plugins.disable names 'rockt'; plugins.allow names 'nope'; plugins.override names 'x.y'"
    )
    assert caught.value.field == "plugins.disable" and caught.value.value == ["rockt"]
    assert caught.value.remedy == "did you mean 'rocket'? installed: attention_backends.rocket"


def test_override_to_someone_who_does_not_own_it(site: Site) -> None:
    site.attention("rocket", distribution="acme")
    with pytest.raises(ConfigError, match=r"'acne' does not own attention_backends.rocket") as caught:
        discover(site, PluginSettings(override={"attention_backends.rocket": "acne"}))
    assert caught.value.remedy == "did you mean 'acme'? owners: acme"


def test_required_must_load_and_have_its_packages(site: Site) -> None:
    site.add("acme", {ATTENTION: {"bad": "fake_bad:Backend"}}, {"fake_bad": "raise RuntimeError('boom')"})
    site.attention("rocket", "requires = ('no-such-package>=2',)")
    registry = discover(site, PluginSettings(required=("bad", "rocket")))
    with pytest.raises(PluginError) as caught:
        registry.enforce()
    assert caught.value.message == (
        "plugin bad (acme 1.0) could not be loaded: RuntimeError: boom\n"
        "  plugin rocket (acme-rocket 1.0) cannot be used: no-such-package>=2 is not installed"
    )
    assert caught.value.field == "plugins.required"


def test_strict_fails_for_any_that_is_not_disabled(site: Site) -> None:
    site.add("acme", {ATTENTION: {"bad": "fake_bad:Backend"}}, {"fake_bad": "raise RuntimeError('boom')"})
    discover(site).enforce()
    discover(site, PluginSettings(strict=True, disable=("bad",))).enforce()
    with pytest.raises(PluginError, match="RuntimeError: boom") as caught:
        discover(site, PluginSettings(strict=True)).enforce()
    assert caught.value.field == "plugins.strict"


def test_options_of_unknown_plugins(site: Site) -> None:
    site.attention("rocket")
    with pytest.raises(ConfigError, match=r"plugins.options names 'rockt'"):
        discover(site, PluginSettings(options={"rockt": {}})).enforce()
