"""What the oracle says of recorded rounds, and what follows from it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from plain_attention import Plain

from jackfield import LLM
from jackfield.errors import ConfigError
from jackfield.interfaces import AttentionRequest, GraphSupport
from recorded.conftest import Start
from recorded.test_recorded_rounds import Told


class Short(Plain):
    """Records few tokens of each sequence."""

    name = "short"

    @classmethod
    def recorded_query(cls, request: AttentionRequest) -> int:
        return 3


class Single(Plain):
    """Records single tokens alone."""

    name = "single"
    graph_support: ClassVar[GraphSupport] = GraphSupport.DECODE


class Drawing(Told):
    """Draws its drafts, where they are not recorded."""

    name = "drawing"
    draws: ClassVar[bool] = True


def rounds(llm: LLM) -> Any:
    executor: Any = llm._core._executor
    return executor.worker._runner._parts.rounds


def notes(llm: LLM) -> str:
    return "\n".join(llm.report.notes)


def test_backends_say_how_many_tokens_they_record() -> None:
    request: Any = None
    assert Plain.recorded_query(request) >= 64
    assert Single.recorded_query(request) == 1


@pytest.mark.parametrize(
    ("drafter", "attention", "drafts", "words"),
    [
        ("told", "plain", 3, "recorded with their drafting"),
        ("told", "short", 2, "recorded with their drafting"),
        ("told", "short", 3, "not recorded; steps with drafts do not overlap"),
        ("told", "single", 3, "not recorded; steps with drafts do not overlap"),
        ("suffix", "plain", 3, "recorded up to the verification; steps with drafts do not overlap"),
    ],
)
def test_rounds_are_recorded_as_far_as_all_parts_can_be(
    start: Start, drafter: str, attention: str, drafts: int, words: str
) -> None:
    speculative = {"speculative.method": drafter, "speculative.num_speculative_tokens": drafts}
    llm = start("recording", Told, Short, Single, attention=attention, **speculative)
    assert f"rounds of speculation: {words}" in notes(llm)
    assert (rounds(llm) is None) == words.startswith("not recorded")
    assert rounds(llm) is None or rounds(llm).drafts == ("drafting" in words)
    assert llm.config.scheduler.async_scheduling == ("drafting" in words)


@pytest.mark.parametrize("platform", ["recording", "cpu"])
def test_how_drafts_are_chosen_follows_from_recording(start: Start, platform: str) -> None:
    llm = start(platform, Drawing, **{"speculative.method": "drawing"})
    wanted = "greedy" if platform == "recording" else "probabilistic"
    assert llm.config.speculative.draft_sample_method == wanted


def test_what_the_user_says_of_drawing_is_kept(start: Start) -> None:
    said = {"speculative.method": "drawing", "speculative.draft_sample_method": "probabilistic"}
    llm = start("recording", Drawing, **said)
    assert llm.config.speculative.draft_sample_method == "probabilistic"
    assert rounds(llm).drafts


def test_overlap_is_refused_where_a_drafter_must_see_every_step(start: Start) -> None:
    with pytest.raises(ConfigError, match="where rounds are not recorded"):
        start("recording", async_scheduling=True, **{"speculative.method": "suffix"})
