"""The one algorithm: rejection at named stages, preference, rank, force, prefer, exclude."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import ATTENTION, FakeAttention, Site, attention_class, site_at
from hypothesis import given
from hypothesis import strategies as st

from jackfield.config.plugins import PluginSettings
from jackfield.config.selection import ResolvedSelection, Selection
from jackfield.errors import ConfigError, NoCandidateError
from jackfield.interfaces import AttentionRequest, Band, DeviceFacts, Preference, Reason
from jackfield.oracle import Decision, Verdict, decide, mark_states
from jackfield.oracle.codes import REASON_CODES, STAGES
from jackfield.registry import PluginState, Registry

REQUEST = AttentionRequest(
    subject="layers 0-3", kind="full", needs=frozenset({"decode"}), dtype="float32", device=DeviceFacts("cpu")
)
BEST, GOOD = Preference(Band.BEST, "measured"), Preference(Band.GOOD, "tuned")


def registry_of(*plugins: type[FakeAttention]) -> Registry:
    registry = Registry()
    for plugin in plugins:
        registry.register(plugin)
    return registry


def choose(registry: Registry, selection: Selection | None = None, **options: Any) -> Decision:
    word = (selection or Selection()).resolve(kind="full")
    request = options.pop("request", REQUEST)
    return decide(registry, "attention_backends", request, word, field="attention", **options)


def rejection(registry: Registry, name: str, **options: Any) -> Verdict:
    """Return the verdict on ``name`` in a registry that also has a plugin which fits."""
    registry.register(attention_class("zz_fits"))
    (found,) = (verdict for verdict in choose(registry, **options).verdicts if verdict.name == name)
    return found


def said(verdict: Verdict) -> list[tuple[str, str, str]]:
    return [(reason.code, reason.fact, reason.detail) for reason in verdict.reasons]


class Raises(FakeAttention):
    name = "raises"

    @classmethod
    def check(cls, request: Any) -> Sequence[Reason]:
        raise KeyError("head_size")


class Dislikes(FakeAttention):
    name = "dislikes"

    @classmethod
    def preference(cls, request: Any) -> Preference:
        raise ValueError("boom")


def test_sets_give_all_reasons() -> None:
    odd = attention_class(
        "odd",
        device_types=frozenset({"npu"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        kinds=frozenset({"mla"}),
        features=frozenset({"prefill"}),
        requires=("no-such-package",),
    )
    request = AttentionRequest(
        kind="full", needs=frozenset({"sinks", "decode"}), dtype="float32", device=DeviceFacts("cpu")
    )
    registry = registry_of(odd, attention_class("fits", features=frozenset({"sinks", "decode"})))
    (verdict,) = choose(registry, request=request).rejected
    assert verdict.stage == "missing_package"
    assert said(verdict) == [
        ("missing_package", "no-such-package", "no-such-package is not installed"),
        ("device", "device.type", "'cpu' is not among 'npu'"),
        ("dtype", "dtype", "'float32' is not among 'bfloat16', 'float16'"),
        ("kind", "kind", "'full' is not among 'mla'"),
        ("feature", "needs", "does not declare the feature 'decode'"),
        ("feature", "needs", "does not declare the feature 'sinks'"),
    ]


@pytest.mark.parametrize(
    ("attributes", "stage"),
    [
        ({"device_types": frozenset({"npu"})}, "device"),
        ({"dtypes": frozenset({"bfloat16"})}, "dtype"),
        ({"kinds": frozenset({"mla"})}, "kind"),
        ({"features": frozenset()}, "feature"),
        ({"requires": ("no-such-package",)}, "missing_package"),
    ],
)
def test_one_fault_gives_one_reason(attributes: dict[str, Any], stage: str) -> None:
    verdict = rejection(registry_of(attention_class("odd", **attributes)), "odd")
    assert verdict.stage == stage and [reason.code for reason in verdict.reasons] == [stage]


def test_star_means_any_and_nothing_declared_means_nothing() -> None:
    assert choose(registry_of(attention_class("any", kinds=frozenset({"*"})))).name == "any"
    verdict = rejection(registry_of(attention_class("none", kinds=frozenset())), "none")
    assert said(verdict) == [("kind", "kind", "'full' is not among nothing")]


def test_check_keeps_the_plugins_own_codes() -> None:
    reasons = (Reason("head_size", "head_size", "80 is not one of 64, 128"), Reason("window", "window", "too small"))
    verdict = rejection(registry_of(attention_class("picky", objections=reasons)), "picky")
    assert (verdict.stage, verdict.reasons) == ("check", reasons)


def test_check_that_raises_is_a_reason_and_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = registry_of(Raises, attention_class("fits"))
    for _ in range(3):
        verdict = choose(registry).rejected[0]
    assert (verdict.stage, said(verdict)) == ("check", [("check_raised", "check", "KeyError: 'head_size'")])
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["plugin raises ((in process)): check_raised"]
    assert "in check" in registry.get("attention_backends", "raises").faults["check"].traceback


def test_check_that_returns_nonsense_is_a_reason() -> None:
    verdict = rejection(registry_of(attention_class("odd", objections=("no",))), "odd")
    assert said(verdict) == [("check_raised", "check", "TypeError: ('no',) holds something that is not a Reason")]


def test_preference_that_raises_or_is_no_preference() -> None:
    verdict = rejection(registry_of(Dislikes), "dislikes")
    assert (verdict.stage, said(verdict)) == ("preference", [("preference_raised", "preference", "ValueError: boom")])
    nan = rejection(registry_of(attention_class("nan", wish=Preference(score=float("nan")))), "nan")
    assert said(nan) == [("preference_raised", "preference", "ValueError: the score is not a number")]
    odd = rejection(registry_of(attention_class("odd", wish=3)), "odd")
    assert said(odd) == [("preference_raised", "preference", "TypeError: 3 is not a Preference with a Band")]


def test_extra_sees_only_candidates_that_accept_and_may_raise() -> None:
    asked = []

    def extra(plugin: type, request: Any) -> Sequence[Reason]:
        asked.append(plugin.__name__)
        if plugin.__name__ == "explodes":
            raise OSError("gone")
        return (Reason("cache_spec", "cache", "no common layout"),) if plugin.__name__ == "apart" else ()

    names = ("apart", "explodes", "fits")
    registry = registry_of(*map(attention_class, names), attention_class("other", kinds=frozenset({"mla"})))
    decision = choose(registry, extra=extra)
    assert sorted(asked) == sorted(names)
    assert decision.name == "fits"
    stages = {verdict.name: (verdict.stage, verdict.reasons[0].code) for verdict in decision.rejected}
    assert stages == {
        "apart": ("environment", "cache_spec"),
        "explodes": ("environment", "probe_raised"),
        "other": ("kind", "kind"),
    }


def test_states_of_the_registry_are_stages(site: Site) -> None:
    site.attention("twin", distribution="acme")
    site.attention("twin", distribution="zeus")
    site.attention("off")
    site.attention("newer", "api = (1, 7)")
    site.add("bad", {ATTENTION: {"broken": "fake_broken:Backend"}}, {"fake_broken": "raise RuntimeError('boom')"})
    site.attention("kept_out")
    site.attention("fits")
    registry = Registry.discover(PluginSettings(disable=("off",)), site.points())
    decision = choose(registry, Selection(exclude=("kept_out",)))
    assert decision.name == "fits"
    assert {(verdict.name, verdict.stage) for verdict in decision.rejected} == {
        ("broken", "load_failed"),
        ("kept_out", "excluded"),
        ("newer", "api_version"),
        ("off", "disabled"),
        ("twin", "duplicate_name"),
    }
    reasons = {verdict.name: said(verdict)[0] for verdict in decision.rejected}
    assert reasons["broken"] == ("load_failed", "plugins.import", "RuntimeError: boom")
    assert reasons["kept_out"] == ("excluded", "attention.exclude", "attention.exclude names it")
    assert "fake_kept_out_acme_kept_out" not in site.imported() and "fake_off_acme_off" not in site.imported()
    assert all(verdict.stage in STAGES and verdict.reasons[0].code in REASON_CODES for verdict in decision.rejected)


def test_rank_is_band_then_score_then_name() -> None:
    plugins = [
        attention_class("d", wish=Preference(Band.FALLBACK, score=9.0)),
        attention_class("c", wish=Preference(Band.GOOD)),
        attention_class("b", wish=Preference(Band.GOOD, score=1.0)),
        attention_class("e", wish=Preference(Band.GOOD, score=2.0)),
        attention_class("a", wish=Preference(Band.GOOD)),
        attention_class("z", wish=BEST),
    ]
    decision = choose(registry_of(*plugins))
    assert [verdict.name for verdict in decision.verdicts] == ["z", "e", "b", "a", "c", "d"]
    assert (decision.name, decision.band, decision.why, decision.how) == ("z", Band.BEST, "measured", "auto")
    assert [verdict.name for verdict in decision.runners_up] == ["e", "b", "a", "c", "d"]
    assert decision.plugin is plugins[-1]


def test_name_comes_before_distribution(site: Site) -> None:
    site.attention("a", distribution="zeus")
    site.attention("b", distribution="acme")
    assert choose(Registry.discover(entry_points=site.points())).name == "a"


def test_prefer_beats_band_and_keeps_its_order() -> None:
    registry = registry_of(attention_class("a"), attention_class("b", wish=GOOD), attention_class("c", wish=BEST))
    decision = choose(registry, Selection(prefer=("a", "b")), origin={"attention.prefer": "site.yaml:3"}.__getitem__)
    assert [verdict.name for verdict in decision.verdicts] == ["a", "b", "c"]
    assert decision.how_text == "preferred by attention.prefer (site.yaml:3)" and decision.fallback == ""


def test_prefer_falls_back_and_says_so() -> None:
    registry = registry_of(
        attention_class("a", features=frozenset()), attention_class("b"), attention_class("c", wish=BEST)
    )
    one = choose(registry, Selection(prefer=("a", "b")))
    text = "attention.prefer names 'a', passed over: feature: does not declare the feature 'decode'"
    assert (one.name, one.how, one.fallback) == ("b", "preferred", text)
    assert choose(registry, Selection(prefer=("b", "a"))).fallback == ""
    two = choose(registry, Selection(prefer=("a",)))
    assert (two.name, two.how, two.setting, two.fallback) == ("c", "auto", "", text)


def test_force_is_used_whatever_the_band() -> None:
    registry = registry_of(attention_class("a"), attention_class("c", wish=BEST))
    selection = Selection(kinds={"full": Selection(force="a")})
    decision = choose(registry, selection, origin=lambda setting: f"cli for {setting}")
    assert (decision.name, decision.how) == ("a", "forced")
    assert decision.how_text == "forced by attention.kinds.full.force (cli for attention.kinds.full.force)"
    assert [verdict.name for verdict in decision.runners_up] == ["c"]


def test_force_that_cannot_serve_shows_the_table() -> None:
    registry = registry_of(attention_class("a", requires=("no-such-package>=2",)), attention_class("c", wish=BEST))
    with pytest.raises(NoCandidateError) as caught:
        choose(registry, Selection(force="a"))
    error = caught.value
    assert error.message == (
        "'a' was forced for attention_backends for target, layers 0-3 (full), but cannot serve it: "
        "missing_package: no-such-package>=2 is not installed"
    )
    assert (error.field, error.value) == ("attention.force", "a")
    assert error.remedy == "pip install 'no-such-package>=2'; plugins that can serve it: c"
    rows = [line.split() for line in error.table.splitlines() if line.strip()]
    assert rows[0] == ["candidate", "owner", "verdict", "why"]
    assert [row[:2] for row in rows[2:4]] == [["+", "c"], ["-", "a"]]


def test_force_of_an_excluded_plugin() -> None:
    with pytest.raises(NoCandidateError, match=r"excluded: attention.exclude names it") as caught:
        choose(registry_of(attention_class("a"), attention_class("b")), Selection(force="a", exclude=("a",)))
    assert caught.value.remedy == "remove 'a' from attention.exclude; plugins that can serve it: b"


def test_unknown_names_are_errors_that_list_all() -> None:
    registry = registry_of(attention_class("rocket"), attention_class("comet"))
    with pytest.raises(ConfigError) as caught:
        choose(registry, Selection(force="rockt", prefer=("commet", "comet"), exclude=("x",)))
    error = caught.value
    assert error.message == (
        "no such plugin in attention_backends: attention.force names 'rockt'; "
        "attention.prefer names 'commet'; attention.exclude names 'x'"
    )
    assert (error.field, error.value) == ("attention.force", "rockt")
    assert error.remedy == "did you mean 'rocket'? did you mean 'comet'? installed: comet, rocket"


def test_names_may_carry_family_and_distribution(site: Site) -> None:
    site.attention("rocket")
    site.attention("comet")
    registry = Registry.discover(entry_points=site.points())
    assert choose(registry, Selection(force="attention_backends.rocket@acme-rocket")).name == "rocket"
    assert choose(registry, Selection(exclude=("comet@acme-comet",))).name == "rocket"


def test_no_candidate_names_the_nearest_miss() -> None:
    registry = registry_of(
        attention_class("far", features=frozenset(), dtypes=frozenset({"bfloat16"})),
        attention_class("near", objections=(Reason("head_size", "head_size", "80 is not one of 64, 128", "use fits"),)),
        attention_class("other", kinds=frozenset({"mla"})),
    )
    with pytest.raises(NoCandidateError) as caught:
        choose(registry)
    assert caught.value.message == (
        "no plugin fits attention_backends for target, layers 0-3 (full); "
        "the nearest is 'near' ((in process)): head_size: 80 is not one of 64, 128"
    )
    assert (caught.value.field, caught.value.value, caught.value.remedy) == ("attention", "full", "use fits")
    assert all(name in caught.value.table for name in ("far", "near", "other"))


def test_nearest_is_the_one_with_the_fewest_reasons_then_the_one_that_came_furthest() -> None:
    two = (Reason("head_size", "head_size", "80"), Reason("window", "window", "9"))
    late, early = attention_class("late", objections=two), attention_class("early", dtypes=frozenset({"bfloat16"}))
    with pytest.raises(NoCandidateError, match="the nearest is 'early'"):
        choose(registry_of(late, early))
    with pytest.raises(NoCandidateError, match="the nearest is 'later'"):
        choose(registry_of(early, attention_class("later", features=frozenset())))


def test_no_candidate_of_that_kind() -> None:
    registry = registry_of(attention_class("a"), attention_class("b", kinds=frozenset({"mla", "sliding"})))
    request = AttentionRequest(kind="slidng")
    with pytest.raises(NoCandidateError) as caught:
        choose(registry, request=request)
    assert caught.value.message == "no plugin fits attention_backends for target (slidng): none serves 'slidng'"
    assert caught.value.remedy == "did you mean 'sliding'? installed plugins serve: full, mla, sliding"


def test_nothing_installed() -> None:
    with pytest.raises(NoCandidateError) as caught:
        choose(Registry())
    assert caught.value.remedy == "no plugin of this family is installed" and caught.value.table == ""


def test_missing_format_gets_what_is_known_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from jackfield.interfaces import QuantizationRequest
    from jackfield.oracle import miss
    from jackfield.registry import KnownDistribution

    def ask() -> str:
        word = ResolvedSelection()
        request = QuantizationRequest(kind="bitsandbytes")
        with pytest.raises(NoCandidateError) as caught:
            decide(Registry(), "quantization_methods", request, word, field="quantization")
        return caught.value.remedy

    assert ask().endswith("; no distribution that offers 'bitsandbytes' is known yet")
    known = (KnownDistribution("acme-bnb", "pip install acme-bnb"),)
    monkeypatch.setattr(miss, "known_distributions", lambda family, kind: known)
    assert ask().endswith("; pip install acme-bnb")


def test_failed_plugin_is_the_nearest_miss(site: Site) -> None:
    site.add("bad", {ATTENTION: {"broken": "fake_broken:Backend"}}, {"fake_broken": "raise RuntimeError('boom')"})
    site.attention("other", "kinds = frozenset({'mla'})")
    with pytest.raises(NoCandidateError, match=r"the nearest is 'broken' \(bad 1.0\): load_failed: RuntimeError: boom"):
        choose(Registry.discover(entry_points=site.points()))


def test_states_are_written_only_when_asked() -> None:
    registry = registry_of(
        attention_class("a"), attention_class("b", wish=BEST), attention_class("c", kinds=frozenset())
    )
    decision = choose(registry)
    assert {ref.state for ref in registry.refs()} == {PluginState.LOADED}
    mark_states([decision])
    states = {ref.name: ref.state for ref in registry.refs()}
    assert states == {"a": PluginState.ACCEPTED, "b": PluginState.ACTIVE, "c": PluginState.LOADED}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with site_at(tmp_path_factory.mktemp("crowd")) as site:
        for name in ("alpha", "beta", "gamma"):
            site.attention(name, "@classmethod", "def preference(cls, request): return Preference(Band.GOOD)")
        site.attention("twin", distribution="acme")
        site.attention("twin", distribution="zeus")
        site.attention("newer", "api = (1, 7)")
        site.attention("none", "kinds = frozenset()")
        yield site


@given(data=st.data())
def test_order_of_entry_points_does_not_matter(crowd: Site, data: st.DataObject) -> None:
    points = crowd.points()
    expected = choose(Registry.discover(entry_points=points)).to_dict()
    shuffled = data.draw(st.permutations(points))
    assert choose(Registry.discover(entry_points=shuffled)).to_dict() == expected
    assert expected["chosen"]["name"] == "alpha"


class Narrow(FakeAttention):
    name = "narrow"
    opt_in = True

    @classmethod
    def preference(cls, request: Any) -> Preference:
        return BEST


def test_a_plugin_that_must_be_named_is_no_candidate_until_it_is() -> None:
    registry = registry_of(Narrow)
    found = rejection(registry, "narrow")
    assert said(found) == [("opt_in", "attention.force", "is used only when it is named")]
    assert found.reasons[0].remedy == "set attention.force to 'narrow'"
    assert choose(registry).name == "zz_fits"
    assert choose(registry, Selection(force="narrow")).name == "narrow"
    assert choose(registry, Selection(prefer=("narrow",))).name == "narrow"
    with pytest.raises(NoCandidateError) as caught:
        choose(registry_of(Narrow))
    assert "set attention.force to 'narrow'" in str(caught.value)
