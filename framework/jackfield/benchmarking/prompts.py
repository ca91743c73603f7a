"""Prompts of a benchmark, and random ones: token ids where the tokenizer can be asked, else words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jackfield.errors import ConfigError

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body "
    "information back parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education"
)
WORDS = tuple(_TEXT.split())
"""Common words: most are one token each."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to be.

    Args:
        prompt: text or token ids, or None when messages are given. messages: a conversation.
        output_len: most tokens of the answer; None leaves it to the server.
    """

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None = None
    output_len: int | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What random prompts are made of.

    Args:
        ids: token ids that stand for common words; empty when prompts must be text.
        tokens_per_word: how many tokens a word of :data:`WORDS` takes, on average.
    """

    ids: tuple[int, ...] = ()
    tokens_per_word: float = 1.0


def vocabulary(ids: Sequence[int]) -> Vocabulary:
    """Return the vocabulary, given what a tokenizer makes of :func:`probe_text`."""
    return Vocabulary(tuple(sorted(set(ids))), len(ids) / len(WORDS))


def probe_text() -> str:
    """Return all words in one text."""
    return _TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    """How long random prompts and their answers are.

    Args:
        input_len: mean number of tokens of a prompt, without the shared prefix. output_len: mean number of tokens of
            an answer. range_ratio: lengths are drawn evenly between mean · (1 - ratio) and mean · (1 + ratio).
        prefix_len: tokens in front of every prompt, the same for all.

    Raises:
        ConfigError: a number is out of its range; all that are wrong are named.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        checks = {
            "--input-len must be at least 1": self.input_len >= 1,
            "--output-len must be at least 1": self.output_len >= 1,
            "--range-ratio must be at least 0 and less than 1": 0 <= self.range_ratio < 1,
            "--prefix-len must be at least 0": self.prefix_len >= 0,
        }
        wrong = [text for text, holds in checks.items() if not holds]
        if wrong:
            raise ConfigError("; ".join(wrong), field="random prompts", value=self, remedy="change these flags")


def random_samples(
    shape: RandomShape, words: Vocabulary, count: int, seed: int, *, text: bool = False, turn: int = 0
) -> list[Sample]:
    """Return ``count`` random prompts; the same seed gives the same ones. ``text`` makes words even where ids are
    known; their lengths in tokens are then right on average only. Each ``turn`` has prompts of its own after the
    shared beginning, so that no run finds those of an earlier one in a prefix cache.
    """
    use_ids = bool(words.ids) and not text
    prefix = _draw(np.random.default_rng(seed), shape.prefix_len, words, use_ids)
    rng = np.random.default_rng([seed, turn])
    samples = []
    for _ in range(count):
        body = _draw(rng, _length(rng, shape.input_len, shape.range_ratio), words, use_ids)
        prompt = [*prefix, *body]
        output_len = _length(rng, shape.output_len, shape.range_ratio)
        samples.append(Sample(prompt if use_ids else " ".join(prompt), output_len=output_len))
    return samples


def _length(rng: np.random.Generator, mean: int, ratio: float) -> int:
    low, high = max(1, round(mean * (1 - ratio))), round(mean * (1 + ratio))
    return int(rng.integers(low, high, endpoint=True))


def _draw(rng: np.random.Generator, tokens: int, words: Vocabulary, use_ids: bool) -> list[Any]:
    if use_ids:
        return [words.ids[place] for place in rng.integers(0, len(words.ids), tokens)]
    count = max(1, round(tokens / words.tokens_per_word)) if tokens else 0
    return [WORDS[place] for place in rng.integers(0, len(WORDS), count)]
