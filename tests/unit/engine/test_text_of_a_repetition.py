"""The token that completes a repetition is text like any other; a token that is an end is not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from jackfield.engine import output_processor
from jackfield.protocol import CoreEvent, EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams


class Letters:
    """A detokenizer of one letter a token."""

    def __init__(self, *_: Any) -> None:
        pass

    def push(self, ids: Iterable[int]) -> str:
        return "".join(chr(97 + token) for token in ids)

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize(("reason", "text"), [("repetition", "abab"), (1, "aba"), (None, "aba")])
def test_the_last_token_of_a_stop(monkeypatch: pytest.MonkeyPatch, reason: int | str | None, text: str) -> None:
    monkeypatch.setattr(output_processor, "IncrementalDetokenizer", Letters)
    outputs = output_processor.OutputProcessor(object())  # type: ignore[arg-type]
    made = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[9],
        sampling_params=SamplingParams(),
        eos_token_ids=[1],
        max_tokens=9,
        seed=0,
    )
    outputs.add("r", None, [made])
    events = [CoreEvent("r", [0, 1, 0]), CoreEvent("r", [1], FinishReason.STOP, reason)]
    told = [outputs.process(EngineCoreOutput([event]))[0][0].outputs[0] for event in events]
    assert (told[-1].text, told[-1].finish_reason, told[-1].stop_reason) == (text, "stop", reason)
    assert told[-1].token_ids == [0, 1, 0, 1]
