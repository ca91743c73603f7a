"""From the fields of a request to sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from jackfield.errors import RequestError
from jackfield.protocol import SamplingParams
from jackfield.protocol.sampling_params import OutputKind
from jackfield.server.engine_view import Engine
from jackfield.server.openai.types import SamplingFields
from jackfield.server.state import ServerState

PASSED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "bad_words"),
    *("allowed_token_ids", "repetition_detection", "skip_special_tokens", "spaces_between_special_tokens"),
    "extra_args",
)
"""Fields that are sampling parameters of the same name and meaning."""
_UNSENDABLE: Mapping[type[Exception], str] = {
    UnicodeEncodeError: "a text has half of a surrogate pair, which is no character",
    OverflowError: "a whole number is too large",
    RecursionError: "lists or objects lie too deep in each other",
}
MAX_BIAS = 100.0
MAX_CHOICES = 16384
"""Choices of one request, over all its prompts."""


def sampling_params(
    engine: Engine, request: SamplingFields, *, max_tokens: int | None, **others: int | None
) -> SamplingParams:
    """Return the parameters of a request: the model's defaults, then what the request gives.

    Args:
        max_tokens: resolved; 0 becomes one token, which the answer leaves out. others: logprobs, prompt_logprobs, n.

    Raises:
        RequestError: a value is out of range.
    """
    given = {name: value for name in PASSED if (value := getattr(request, name)) is not None}
    given |= {name: value for name, value in others.items() if value is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = logit_bias(request.logit_bias)
    check_sendable(given)
    kind = OutputKind.DELTA if request.stream else OutputKind.FINAL_ONLY
    tokens = None if max_tokens is None else max(max_tokens, 1)
    return engine.default_sampling_params(**given, max_tokens=tokens, output_kind=kind)


def default_max_tokens(engine: Engine, fallback: int | None) -> int | None:
    """Return the most tokens of an answer when the request does not say: the model's or the operator's default."""
    found: int | None = engine.sampling_defaults.get("max_tokens", fallback)
    return found


def logit_bias(given: dict[str, float]) -> dict[int, float]:
    """Return biases by token id.

    Raises:
        RequestError: a key is no token id, or a bias is not from -100 to 100.
    """
    return {_token(key): _bias(key, value) for key, value in given.items()}


def check_sendable(given: Mapping[str, Any]) -> None:
    """Refuse values that no message can carry, wherever in a field they are.

    Raises:
        RequestError: a text is no Unicode, a number is too large, or lists lie too deep in each other.
    """
    for name, value in given.items():
        try:
            # Rules of plain numbers have texts of their own; only what no comparison can take is caught here.
            float(value) if isinstance(value, int) else msgspec.msgpack.encode(value)
        except (UnicodeEncodeError, OverflowError, RecursionError) as error:
            raise RequestError(_UNSENDABLE[type(error)], field=name, value=value, remedy="change it") from None


def check_logprobs(state: ServerState, field: str, value: int | None) -> None:
    """Refuse more log probabilities than the server gives.

    Raises:
        RequestError: names the limit.
    """
    limit = state.settings.max_logprobs
    if value is not None and not 0 <= value <= limit:
        raise RequestError(
            f"{field} must be a whole number from 0 to {limit}",
            field=field,
            value=value,
            remedy=f"ask for at most {limit}, or start the server with a higher --max-logprobs",
        )


def check_common(state: ServerState, request: SamplingFields) -> None:
    """Refuse what no kind of completion can honour.

    Raises:
        RequestError, ModelNotServedError: it cannot be served.
    """
    state.check_model(request.model)
    check_logprobs(state, "prompt_logprobs", request.prompt_logprobs)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs a stream", field="stream_options", remedy="set stream to true")
    if request.truncate_prompt_tokens == 0:
        raise RequestError(
            "a prompt cannot be cut to nothing", field="truncate_prompt_tokens", value=0, remedy="-1 keeps what fits"
        )
    policy = state.engine.config.scheduler.policy
    if request.priority and policy == "fcfs":
        raise RequestError(
            f"the server's scheduling policy '{policy}' does not read priorities",
            field="priority",
            value=request.priority,
            remedy="leave it out, or start the server with --policy priority",
        )
    if request.priority is not None and not -(2**63) <= request.priority < 2**63:
        raise RequestError("priority must be a 64-bit whole number", field="priority", value=request.priority)


def check_scored(request: SamplingFields, max_tokens: int | None, *, scored: bool, field: str) -> None:
    """Refuse an answer of no tokens that would say nothing.

    Raises:
        RequestError: max_tokens is 0, and nothing of the prompt is asked for.
    """
    if max_tokens == 0 and not scored:
        raise RequestError(
            f"{field} is 0, which only scores a prompt, and no score is asked for",
            field=field,
            value=0,
            remedy="ask for at least one token, or set echo or prompt_logprobs",
        )
    if max_tokens == 0 and request.min_tokens:
        raise RequestError(f"min_tokens must be at most {field} = 0", field="min_tokens", value=request.min_tokens)


def _token(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 12):
        raise RequestError(
            "keys of logit_bias are token ids", field="logit_bias", value=key, remedy='write {"1234": -100}'
        )
    return int(key)


def _bias(key: str, value: Any) -> float:
    if not (math.isfinite(value) and abs(value) <= MAX_BIAS):
        raise RequestError(
            "a bias must be from -100 to 100", field=f"logit_bias.{key}", value=value, remedy="write a smaller number"
        )
    return float(value)
