"""How long and on what a draft checkpoint is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jackfield.errors import ConfigError

MAX_LENGTH = 1024
"""Tokens of a piece of text, where the user says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """What users say about a training.

    Args:
        steps: of the optimizer; None: as many as ``epochs`` take. epochs: times through the text.
        batch_tokens: of a step, padding included. learning_rate: the highest; None: the drafter's own.
        max_length: longest piece of text, in tokens; longer documents are cut into pieces. None: 1024, or less where
            the target or a step takes less.
        holdout: share of the documents that is measured on and not learnt from; 0: nothing is measured.
        options: of the drafter, by name.
    """

    steps: int | None = None
    epochs: int | None = None
    batch_tokens: int = 4096
    learning_rate: float | None = None
    max_length: int | None = None
    holdout: float = 0.05
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            ConfigError: there is one; the first is named.
        """
        for name, value, fault, remedy in self._faults():
            raise ConfigError(fault, field=f"--{name.replace('_', '-')}", value=value, remedy=remedy)

    def piece_length(self, longest: int) -> int:
        """Return the length of pieces for a target that takes sequences of ``longest`` tokens.

        Raises:
            ConfigError: more is wanted.
        """
        if self.max_length is None:
            return min(MAX_LENGTH, self.batch_tokens, longest)
        if self.max_length > longest:
            raise ConfigError(
                f"the target takes sequences of {longest} tokens",
                field="--max-length",
                value=self.max_length,
                remedy=f"use {longest} or less",
            )
        return self.max_length

    def _faults(self) -> Iterator[tuple[str, Any, str, str]]:
        for name in ("steps", "epochs", "batch_tokens", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield name, value, f"{name} is no positive number", "use 1 or more"
        if self.steps is not None and self.epochs is not None:
            yield "steps", self.steps, "steps and epochs both say how long to train", "leave one of them out"
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            yield "learning_rate", self.learning_rate, "the learning rate is not between 0 and 1", "try 0.001"
        if not 0 <= self.holdout < 1:
            yield "holdout", self.holdout, "holdout is no share of the documents", "use 0.05 for one in twenty"
        if self.max_length is not None and self.max_length > self.batch_tokens:
            fault = f"a step has {self.batch_tokens} tokens, and a piece may have more"
            yield "max_length", self.max_length, fault, "lower it, or raise --batch-tokens"
