from __future__ import annotations

import math
import pickle
from typing import Any

import msgspec
import pytest

from jackfield.errors import RequestError
from jackfield.protocol import FinishReason, SamplingParams

BAD: list[tuple[str, Any, str]] = [
    ("n", 0, "a whole number from 1 to 16384"),
    ("n", 16385, "a whole number from 1 to 16384"),
    ("n", 1.5, "a whole number"),
    ("n", "2", "a whole number from 1 to 16384"),
    ("temperature", -0.1, "a finite number >= 0"),
    ("temperature", math.inf, "a finite number >= 0"),
    ("temperature", math.nan, "a finite number >= 0"),
    ("temperature", "hot", "a finite number >= 0"),
    ("top_p", 0.0, "in (0, 1]"),
    ("top_p", 1.01, "in (0, 1]"),
    ("top_p", None, "in (0, 1]"),
    ("top_k", -2, "0 or -1 (off) or a positive whole number"),
    ("top_k", 1.5, "0 or -1 (off) or a positive whole number"),
    ("top_k", True, "0 or -1 (off) or a positive whole number"),
    ("min_p", -0.1, "in [0, 1]"),
    ("min_p", 1.1, "in [0, 1]"),
    ("presence_penalty", 2.1, "in [-2, 2]"),
    ("frequency_penalty", -2.1, "in [-2, 2]"),
    ("temperature", 10**400, "a finite number >= 0"),
    ("logit_bias", {1: 10**400}, "a map from token ids to numbers"),
    ("repetition_penalty", 0.0, "a finite number > 0"),
    ("repetition_penalty", math.inf, "a finite number > 0"),
    ("seed", 2**63, "a 64-bit whole number"),
    ("seed", -(2**63) - 1, "a 64-bit whole number"),
    ("seed", 1.0, "a 64-bit whole number"),
    ("max_tokens", 0, "a whole number >= 1"),
    ("max_tokens", "5", "a whole number >= 1"),
    ("min_tokens", -1, "a whole number >= 0"),
    ("min_tokens", None, "a whole number >= 0"),
    ("min_tokens", 17, "at most max_tokens = 16"),
    ("logprobs", -2, "a whole number >= 0, or -1 for all"),
    ("prompt_logprobs", 0.5, "a whole number >= 0, or -1 for all"),
    ("stop", [""], "a list of non-empty strings"),
    ("stop", [1], "a list of non-empty strings"),
    ("stop", 5, "a list of non-empty strings"),
    ("stop_token_ids", [-1], "a list of token ids"),
    ("stop_token_ids", ["a"], "a list of token ids"),
    ("stop_token_ids", 5, "a list of token ids"),
    ("allowed_token_ids", [], "a non-empty list of token ids"),
    ("allowed_token_ids", [True], "a list of token ids"),
    ("logit_bias", {-1: 1.0}, "a map from token ids to numbers"),
    ("logit_bias", {"1": 1.0}, "a map from token ids to numbers"),
    ("logit_bias", {1: math.nan}, "a map from token ids to numbers"),
    ("logit_bias", {1: math.inf}, "a map from token ids to numbers"),
    ("logit_bias", {1: "much"}, "a map from token ids to numbers"),
    ("logit_bias", [1, 2], "a map from token ids to numbers"),
]


@pytest.mark.parametrize(("field", "value", "rule"), BAD, ids=lambda x: repr(x)[:30])
def test_a_bad_value_names_its_field_and_its_rule(field: str, value: Any, rule: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    error = caught.value
    assert error.field == f"sampling_params.{field}"
    assert error.message == f"{field} must be {rule}"
    assert error.remedy == f"set {field} to a value that is {rule}"

    if not (isinstance(value, float) and math.isnan(value)) and field != "logit_bias":
        assert error.value == value


def test_all_offenders_are_named_at_once() -> None:
    with pytest.raises(RequestError, match=r"temperature must be .*; also: top_p = 2 \(in \(0, 1\]\); seed = 'x' \("):
        SamplingParams(temperature=-1, top_p=2, seed="x")  # type: ignore[arg-type]


def test_too_many_stops_are_counted() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=["a"] * 1025)
    assert (caught.value.field, caught.value.value) == ("sampling_params.stop", 1025)
    assert caught.value.message == "stop must be at most 1024 strings"


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="stop must be empty when detokenize is off"):
        SamplingParams(stop="x", detokenize=False)


def test_greedy_completions_would_be_equal() -> None:
    with pytest.raises(RequestError, match="n must be 1 when sampling is greedy"):
        SamplingParams(n=2, temperature=0)


@pytest.mark.parametrize(
    "values",
    [
        {"n": 16384},
        {"temperature": 0},
        {"temperature": 2e6},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"repetition_penalty": 1e7},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": None, "min_tokens": 1000},
        {"min_tokens": 16},
        {"logprobs": -1},
        {"stop": ["a"] * 1024},
        {"logit_bias": {0: -math.inf}},
        {"stop_token_ids": []},
    ],
    ids=repr,
)
def test_values_at_the_borders_are_fine(values: dict[str, Any]) -> None:
    made = SamplingParams(**values)
    assert {name: getattr(made, name) for name in values} == values


def test_spellings_of_off_and_of_one_stop() -> None:
    made = SamplingParams(top_k=-1, seed=-1, stop="END")
    assert (made.top_k, made.seed, made.stop, made.stops) == (0, None, ["END"], ["END"])
    assert SamplingParams().stops == []


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_tiny_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_it_crosses_process_borders_unchanged() -> None:
    made = SamplingParams(n=3, stop=["a"], logit_bias={4: 0.5}, seed=7, bad_words=["x"])
    assert pickle.loads(pickle.dumps(made)) == made
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams) == made


def test_an_error_in_a_message_is_an_error_too() -> None:
    with pytest.raises(RequestError, match="temperature must be a finite number >= 0"):
        msgspec.json.decode(b'{"temperature": -1}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="unknown field `temprature`"):
        msgspec.json.decode(b'{"temprature": 1}', type=SamplingParams)


def test_words_for_the_end_of_a_request() -> None:
    assert [reason.text for reason in FinishReason] == ["stop", "length", "abort", "error"]
