"""Platforms in the pipeline: the fallback is never taken silently, and proposals never change a user's value."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import platform_class

from jackfield.errors import ConfigError, PluginError
from jackfield.interfaces import Band, Preference, Probe, Proposal
from jackfield_platforms.cpu import CpuPlatform
from oracle_pipeline.bench import run


def probing(name: str, answer: Probe | Exception) -> Any:
    def probe(cls: Any) -> Probe:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return platform_class(name, probe=classmethod(probe))


def proposing(*proposals: Proposal) -> Any:
    return platform_class(
        "rockets",
        preference=classmethod(lambda cls, request: Preference(Band.BEST, "rockets")),
        proposals=classmethod(lambda cls, config, facts: proposals),
    )


def test_a_raising_probe_stops_when_only_the_fallback_is_left() -> None:
    with pytest.raises(PluginError) as caught:
        run(probing("exploding", OSError("driver exploded")))
    error = caught.value
    assert error.message == (
        "only the fallback platform 'cpu' is left, because others failed:\n"
        "  plugin exploding ((in process)): probe_raised: OSError: driver exploded"
    )
    assert (error.field, error.value) == ("platform.force", None)
    assert error.remedy == "fix or disable the failed plugin, or name the fallback: platform.force: cpu"


def test_the_fallback_that_was_named_is_used() -> None:
    resolution = run(probing("exploding", OSError("driver exploded")), platform="cpu")
    assert resolution.platform is CpuPlatform
    decision = resolution.report.decisions[0]
    assert (decision.how_text, decision.name) == ("forced by platform.force (api: platform)", "cpu")


def test_an_absent_device_is_no_failure() -> None:
    assert run(probing("absent", Probe(False, "no driver found"))).platform is CpuPlatform


def test_a_present_platform_goes_before_the_fallback() -> None:
    resolution = run(proposing())
    assert resolution.platform.name == "rockets"
    assert (resolution.device.type, resolution.config.cache.block_size) == ("rockets", 16)


SHOULD = Proposal("cache.block_size", 64, False, "rockets like it")
MUST = Proposal("cache.block_size", 64, True, "rockets need it")


@pytest.mark.parametrize("proposal", [SHOULD, MUST])
def test_a_proposal_fills_what_nobody_set(proposal: Proposal) -> None:
    resolution = run(proposing(proposal))
    assert resolution.config.cache.block_size == 64
    (outcome,) = resolution.report.proposals
    assert (outcome.field, outcome.value, outcome.must) == ("cache.block_size", 64, proposal.must)
    assert (outcome.owner, outcome.applied, outcome.note) == ("platforms.rockets", True, "")


def test_what_should_be_gives_way_to_the_user() -> None:
    resolution = run(proposing(SHOULD), block_size=8)
    assert resolution.config.cache.block_size == 8
    (outcome,) = resolution.report.proposals
    assert (outcome.applied, outcome.note) == (False, "refused: 8 from api: block_size")
    text = "proposal: platforms.rockets proposes cache.block_size = 64 (should): rockets like it; not applied: "
    assert text in resolution.report.render(width=400)


def test_what_must_be_and_the_user_contradict() -> None:
    with pytest.raises(ConfigError) as caught:
        run(proposing(MUST), block_size=8)
    error = caught.value
    assert error.message == "cache.block_size is 8 (api: block_size), but must be 64: rockets need it"
    assert (error.field, error.value) == ("cache.block_size", 8)
    assert error.remedy == "set cache.block_size to 64 or leave it out"


def test_a_user_who_says_the_same_agrees() -> None:
    resolution = run(proposing(MUST), block_size=64)
    (outcome,) = resolution.report.proposals
    assert (outcome.applied, outcome.note) == (False, "agrees: 64 from api: block_size")
    assert resolution.config.cache.block_size == 64
