"""SamplingParams: how tokens of one request are chosen and when it ends. Names, ranges and defaults are those users
of the field know.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import msgspec

from jackfield.errors import RequestError

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy: dividing logits by less would overflow."""
MAX_N = 16384
MAX_STOPS = 1024
MAX_PATTERN = 4096
"""Longest pattern, and most copies, of repetition detection: what is looked at for each token has a bound."""


class OutputKind(Enum):
    """What a stream of outputs holds: all text so far, only what is new, or one output at the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class RepetitionDetection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """When an output that repeats itself ends: at ``min_count`` copies of one pattern, one directly behind the other.

    Args:
        max_pattern_size: longest pattern, in tokens; 0: off. min_pattern_size: shortest one; 0 counts as 1.
        min_count: copies, at least 2.

    Raises:
        RequestError: a value is out of range.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        rules = {
            "max_pattern_size": (0, MAX_PATTERN),
            "min_pattern_size": (0, self.max_pattern_size),
            "min_count": (2, MAX_PATTERN),
        }
        for name, (low, high) in rules.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise RequestError(
                    f"{name} must be a whole number from {low} to {high}",
                    field=f"sampling_params.repetition_detection.{name}",
                    value=value,
                    remedy=f"set {name} to a value from {low} to {high}",
                )


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """How tokens of one request are chosen and when it ends.

    Args:
        n: completions per prompt, 1 to 16384.
        temperature: softmax temperature, >= 0; below 1e-5 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this, (0, 1].
        top_k: keep this many tokens; 0 or -1 keeps all.
        min_p: keep tokens with at least this fraction of the most likely one's probability, [0, 1].
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for output tokens, [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of prompt and output tokens, > 0 (CTRL,
            arXiv:1909.05858).
        seed: makes this request's draws reproducible, whatever else runs; None draws a fresh seed.
        stop: strings that end the output; a single string is taken as a list of one.
        stop_token_ids: token ids that end the output, also with ignore_eos.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: go on after the model's end-of-sequence tokens.
        max_tokens: most new tokens; None: what is left of the context.
        min_tokens: no stop of any kind before this many new tokens.
        logprobs: log probabilities of this many most likely tokens per position (and of the sampled one); -1: the
            whole vocabulary.
        prompt_logprobs: the same for prompt tokens.
        logit_bias: added to the logits of token ids.
        allowed_token_ids: only these may be sampled.
        bad_words: strings that must not be generated.
        repetition_detection: end an output that repeats itself, with stop reason "repetition"; a map is taken too.
        detokenize: produce text. skip_special_tokens, spaces_between_special_tokens: how.
        output_kind: see :class:`OutputKind`.
        extra_args: for plugins.

    Raises:
        RequestError: a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetection | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None
        if isinstance(self.repetition_detection, dict):
            self.repetition_detection = _repetition(self.repetition_detection)
        problems = [check for check in self._checks() if check is not None]
        if problems:
            field, value, rule = problems[0]
            others = "; ".join(f"{f} = {v!r} ({r})" for f, v, r in problems[1:])
            raise RequestError(
                f"{field} must be {rule}" + (f"; also: {others}" if others else ""),
                field=f"sampling_params.{field}",
                value=value,
                remedy=f"set {field} to a value that is {rule}",
            )

    def _checks(self) -> list[tuple[str, object, str] | None]:
        def span(name: str, low: float, high: float, rule: str, *, open_low: bool = False) -> Any:
            value = getattr(self, name)
            inside = _is_finite(value) and (low < value if open_low else low <= value) and value <= high
            return None if inside else (name, value, rule)

        def whole(name: str, low: int, rule: str, *, none: bool = True) -> Any:
            value = getattr(self, name)
            if value is None and none:
                return None
            good = isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63
            return None if good else (name, value, rule)

        return [
            span("n", 1, MAX_N, f"a whole number from 1 to {MAX_N}") or whole("n", 1, "a whole number", none=False),
            span("temperature", 0, math.inf, "a finite number >= 0"),
            span("top_p", 0, 1, "in (0, 1]", open_low=True),
            whole("top_k", 0, "0 or -1 (off) or a positive whole number", none=False),
            span("min_p", 0, 1, "in [0, 1]"),
            span("presence_penalty", -2, 2, "in [-2, 2]"),
            span("frequency_penalty", -2, 2, "in [-2, 2]"),
            span("repetition_penalty", 0, math.inf, "a finite number > 0", open_low=True),
            whole("seed", -(2**63), "a 64-bit whole number"),
            whole("max_tokens", 1, "a whole number >= 1"),
            whole("min_tokens", 0, "a whole number >= 0", none=False),
            whole("logprobs", -1, "a whole number >= 0, or -1 for all"),
            whole("prompt_logprobs", -1, "a whole number >= 0, or -1 for all"),
            self._check_stop(),
            self._check_ids("stop_token_ids"),
            self._check_ids("allowed_token_ids"),
            self._check_bias(),
            self._check_repetition(),
            self._check_min_tokens(),
            self._check_greedy_n(),
        ]

    def _check_stop(self) -> tuple[str, object, str] | None:
        stops = () if self.stop is None else self.stop
        if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops):
            return ("stop", self.stop, "a list of non-empty strings")
        if len(stops) > MAX_STOPS:
            return ("stop", len(stops), f"at most {MAX_STOPS} strings")
        if stops and not self.detokenize:
            return ("stop", self.stop, "empty when detokenize is off, since stop strings are found in text")
        return None

    def _check_ids(self, name: str) -> tuple[str, object, str] | None:
        ids = getattr(self, name)
        if ids is None:
            return None
        if not isinstance(ids, (list, tuple)) or not all(_is_id(i) for i in ids):
            return (name, ids, "a list of token ids")
        if name == "allowed_token_ids" and not ids:
            return (name, ids, "a non-empty list of token ids")
        return None

    def _check_bias(self) -> tuple[str, object, str] | None:
        rule = "a map from token ids to numbers"
        if not isinstance(self.logit_bias, (dict, type(None))):
            return ("logit_bias", self.logit_bias, rule)
        for token, bias in (self.logit_bias or {}).items():
            # Minus infinity forbids a token; plus infinity would leave no distribution to draw from.
            if not _is_id(token) or not (_is_finite(bias) or bias == -math.inf):
                return ("logit_bias", {token: bias}, rule)
        return None

    def _check_repetition(self) -> tuple[str, object, str] | None:
        good = isinstance(self.repetition_detection, (RepetitionDetection, type(None)))
        return None if good else ("repetition_detection", self.repetition_detection, "a RepetitionDetection or a map")

    def _check_min_tokens(self) -> tuple[str, object, str] | None:
        comparable = isinstance(self.max_tokens, int) and isinstance(self.min_tokens, int)
        if comparable and self.max_tokens is not None and self.min_tokens > self.max_tokens >= 1:
            return ("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        return None

    def _check_greedy_n(self) -> tuple[str, object, str] | None:
        if isinstance(self.n, int) and self.n > 1 and isinstance(self.temperature, (int, float)) and self.is_greedy:
            return ("n", self.n, "1 when sampling is greedy, since all completions would be equal")
        return None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_EPSILON

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return list(self.stop or ())


def _repetition(values: dict[str, Any]) -> RepetitionDetection:
    try:
        return RepetitionDetection(**values)
    except TypeError as error:
        names = ", ".join(RepetitionDetection.__struct_fields__)
        raise RequestError(
            f"repetition_detection is malformed: {error}",
            field="sampling_params.repetition_detection",
            value=values,
            remedy=f"give max_pattern_size, and no others than: {names}",
        ) from None


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_finite(value: object) -> bool:
    """Return whether ``value`` is a number that a float holds; truth values are none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
