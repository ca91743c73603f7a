"""Faults that users of such servers met, tried on requests and metrics alone. Names begin with the entry's letter and
number.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from api_calls import CHAT, HI, TOOLS
from fake_engine import FakeEngine, post

from jackfield.config import load_config
from jackfield.errors import ConfigError
from jackfield.metrics import MetricsCollector
from jackfield.metrics.distributions import FinishedRequest
from jackfield.protocol import CoreEvent, EngineCoreOutput


def test_f117_arguments_in_the_history_that_are_no_json() -> None:
    broken = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    turns = [*HI, {"role": "assistant", "content": None, "tool_calls": [broken]}]
    answer = post(FakeEngine(template=TOOLS), CHAT, {"messages": turns})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.1.tool_calls.0.function.arguments"


def finished(**changes: Any) -> FinishedRequest:
    about: dict[str, Any] = {"reason": "stop", "arrival": 1.0, "first_token": 2.0, "last_token": 3.0}
    return FinishedRequest(**{**about, "prompt_tokens": 1000, "cached_tokens": 0, **changes})


def test_v251_an_error_of_metrics_stops_no_request(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsCollector()
    metrics.finish(finished())
    before = metrics.snapshot()
    with caplog.at_level(logging.ERROR, "jackfield.metrics"):
        metrics.finish(finished(prompt_tokens="many"))
    assert len(caplog.records) == 1
    metrics.finish(finished())
    assert metrics.snapshot().first_tokens >= before.first_tokens == 1


def test_v253_the_first_token_of_a_request_counts_once_however_many_chunks_its_prompt_had() -> None:
    metrics = MetricsCollector()
    for ids in ([], [], [], [5], [6]):
        metrics.step(EngineCoreOutput([CoreEvent("a", ids, None, None, None, None, cached_tokens=0)]))
    metrics.finish(finished())
    metrics.finish(finished(first_token=None, last_token=None, reason="abort"))
    found = metrics.snapshot()
    assert (found.first_tokens, found.generation_tokens) == (1, 2)
    assert found.histograms["time_to_first_token_seconds"].cumulative[-1] == 1


def test_v259_settings_that_are_unknown_or_malformed_are_told_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        load_config(api={"model": "m", "server.max_body_byte": 5}, env={})
    with pytest.raises(ConfigError) as wrong:
        load_config(api={"model": "m", "generation": "{temperature: 1"}, env={})
    assert "'generation' takes a map of names to values, not '{temperature: 1'" in str(wrong.value)
