"""Beam search, as a loop over ordinary one-token requests: prefixes are shared through the prefix cache.

The rules are those of HF transformers' ``generate`` with ``early_stopping=False``: in every step the best 2k
continuations of k beams are looked at;
those that end are finished if they are among the best k, the best k that do not end go on; a finished sequence scores
its log probability over its
length to the power of ``length_penalty``; the search ends when no running beam can beat the worst of k finished ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from jackfield.engine.outputs import RequestOutput
from jackfield.errors import RequestError
from jackfield.protocol import SamplingParams

Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]
"""Token prompts to outputs with one token each."""


class BeamSearchParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to search.

    Args:
        beam_width: beams, at least 1. max_tokens: most new tokens. ignore_eos: go on after end tokens.
        length_penalty: exponent of the length in a finished sequence's score.

    Raises:
        RequestError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(
                    f"{name} must be a whole number >= 1", field=name, value=value, remedy="use 1 or more"
                )


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence: all its tokens (prompt included), its summed log probability, its score and its new text."""

    tokens: list[int]
    cum_logprob: float
    score: float = 0.0
    text: str | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    """The state of one prompt's search."""

    prompt: list[int]
    running: list[BeamSearchSequence]
    finished: list[BeamSearchSequence] = field(default_factory=list)
    over: bool = False


def beam_search(
    prompts: Sequence[list[int]], params: BeamSearchParams, ends: frozenset[int], limit: int, generate: Generate
) -> list[BeamSearchOutput]:
    """Return the best sequences of each prompt.

    Args:
        prompts: token ids. ends: end-of-sequence ids. limit: longest sequence. generate: runs one-token requests.
    """
    searches = [_Search(list(p), [BeamSearchSequence(list(p), 0.0)]) for p in prompts]
    ends = frozenset() if params.ignore_eos else ends
    width = max(2, 1 + len(ends)) * params.beam_width
    one_token = SamplingParams(temperature=0, max_tokens=1, logprobs=width, detokenize=False, ignore_eos=True)
    for step in range(1, params.max_tokens + 1):
        live = [s for s in searches if not s.over]
        beams = [beam for search in live for beam in search.running]
        if not beams:
            break
        outputs = iter(generate([beam.tokens for beam in beams], one_token))
        for search in live:
            last = step == params.max_tokens or len(search.running[0].tokens) + 1 >= limit
            _advance(search, [next(outputs) for _ in search.running], params, ends, last=last)
    return [BeamSearchOutput(_best(search.finished, params.beam_width)) for search in searches]


def _advance(
    search: _Search, outputs: list[RequestOutput], params: BeamSearchParams, ends: frozenset[int], *, last: bool
) -> None:
    """Extend the beams of one prompt by a token."""
    width = params.beam_width
    candidates = []
    for beam, output in zip(search.running, outputs, strict=True):
        for token, entry in (output.outputs[0].logprobs or [{}])[0].items():
            candidates.append(BeamSearchSequence([*beam.tokens, token], beam.cum_logprob + entry.logprob))
    candidates.sort(key=lambda c: -c.cum_logprob)
    running: list[BeamSearchSequence] = []
    for place, candidate in enumerate(candidates):
        if candidate.tokens[-1] in ends:
            if place < width:
                _finish(search, candidate, params, "stop")
        elif len(running) < width:
            running.append(candidate)
    search.running = running
    search.finished = _best(search.finished, width)
    if last:
        for beam in running:
            _finish(search, beam, params, "length")
    search.over = last or not running or not _can_improve(search, params)


def _finish(search: _Search, beam: BeamSearchSequence, params: BeamSearchParams, reason: str) -> None:
    length = len(beam.tokens) - len(search.prompt)
    beam.score = beam.cum_logprob / length**params.length_penalty
    beam.finish_reason = reason
    search.finished.append(beam)


def _can_improve(search: _Search, params: BeamSearchParams) -> bool:
    """Return whether a running beam, were it to end now, could beat the worst finished one."""
    if len(search.finished) < params.beam_width:
        return True
    best = search.running[0]
    length = len(best.tokens) - len(search.prompt)
    worst = min(beam.score for beam in search.finished)
    return bool(best.cum_logprob / length**params.length_penalty > worst)


def _best(sequences: list[BeamSearchSequence], count: int) -> list[BeamSearchSequence]:
    return sorted(sequences, key=lambda s: -s.score)[:count]
