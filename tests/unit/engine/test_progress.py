"""The progress bar of offline requests."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jackfield.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jackfield.engine.progress import RequestBar


class Bar:
    """Remembers what it is told."""

    def __init__(self, **options: Any) -> None:
        self.options, self.count, self.texts, self.closed = options, 0, [], False  # type: ignore[var-annotated]

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.texts.append(text)

    def update(self, count: int) -> None:
        self.count += count

    def close(self) -> None:
        self.closed = True


def output(prompt: int, *completions: int) -> RequestOutput:
    made = [CompletionOutput(i, token_ids=[1] * size) for i, size in enumerate(completions)]
    return RequestOutput("r", None, [7] * prompt, made, True, RequestMetrics(0.0))


def test_a_bar_counts_requests_and_tells_the_rates_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bars: list[Bar] = []

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    bar = RequestBar(make, 2)
    now[0] = 102.0
    bar.ended(output(10, 4, 6))
    now[0] = 104.0
    bar.ended(output(30, 2))
    bar.close()
    assert bars[0].options == {"total": 2, "desc": "requests"}
    assert bars[0].texts == ["in: 5.0 tokens/s, out: 5.0 tokens/s", "in: 10.0 tokens/s, out: 3.0 tokens/s"]
    assert (bars[0].count, bars[0].closed) == (2, True)


def test_without_a_maker_tqdm_draws(capsys: pytest.CaptureFixture[str]) -> None:
    bar = RequestBar(True, 1)
    bar.ended(output(3, 5))
    bar.close()
    assert re.search(r"requests: 100%.*in: [\d.]+ tokens/s, out: [\d.]+ tokens/s", capsys.readouterr().err)
