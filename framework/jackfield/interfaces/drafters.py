"""Drafter: proposes tokens that the target verifies (speculative decoding). Group ``jackfield.drafters.v1``.

Verification is the core's: whatever a drafter proposes, the tokens that come out follow the target's distribution. A
drafter can only make the engine faster or
slower.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces.attention import GraphSupport
from jackfield.interfaces.cache import CacheSpec
from jackfield.interfaces.plugin import Plugin, Request, Settings

if TYPE_CHECKING:
    import numpy as np
    import torch

NEEDS = frozenset({"tokens", "last_hidden", "taps", "draft_checkpoint", "draft_cache"})
"""What a drafter may need of the engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterRequest(Request):
    """Asks for a drafter. ``kind`` is the method that the user named.

    Args:
        num_tokens: drafts per step that the user asked for.
        target_architecture: of the model that verifies. vocab_size: of the target.
        offers: which of :data:`NEEDS` this engine and target can supply.
        model: the draft checkpoint, or ``""``.
    """

    num_tokens: int = 0
    target_architecture: str = ""
    vocab_size: int = 0
    offers: frozenset[str] = frozenset()
    model: str = ""


@dataclass(slots=True)
class DraftBatch:
    """The sequences that want drafts. B sequences, one entry each.

    Args:
        slots: request slots, stable while a request lives.
        token_ids: host view [slots, max_length] int32 of prompt and output tokens (None for device drafters).
        lengths: [B] tokens of each sequence so far.
        limits: [B] most drafts that are useful for each sequence (its remaining length).
        hidden: [B, E] last hidden states, for drafters that need them.
        taps: residual streams at the layers that the drafter asked for.
        last_tokens: [B] last sampled token on the device, or None.
    """

    slots: np.ndarray[Any, Any]
    token_ids: np.ndarray[Any, Any] | None
    lengths: np.ndarray[Any, Any]
    limits: np.ndarray[Any, Any]
    hidden: torch.Tensor | None = None
    taps: Sequence[torch.Tensor] = ()
    last_tokens: torch.Tensor | None = None


@dataclass(slots=True)
class Drafts:
    """Proposed tokens.

    Args:
        ids: [B, K] token ids; rows are padded with -1 behind their last draft.
        parents: [B, K] index of each draft's parent in its row (-1: the last token), for trees; None for a chain.
        probabilities: [B, K, V] the distribution each draft was drawn from; None when drafts are certain (point
            masses).
    """

    ids: Any
    parents: Any | None = None
    probabilities: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What verification made of the drafts: ``accepted`` [B] drafts kept, ``slots`` [B] whose."""

    slots: np.ndarray[Any, Any]
    accepted: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class DrafterEnv:
    """What a drafter is given when it is built.

    Args:
        request: the request that was decided. max_sequences, max_length: sizes. settings: the plugin's options.
            device: the worker's device.
        target: the target model, for sharing embedding and head. build: makes models and layers for a draft checkpoint.
    """

    request: DrafterRequest
    max_sequences: int
    max_length: int
    device: Any = None
    settings: Settings = field(default_factory=Settings)
    target: Any = None
    build: Any = None


class Drafter(Plugin):
    """Proposes tokens."""

    family: ClassVar[str] = "drafters"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})
    """Which of :data:`NEEDS` it must get; refused at configuration time where the engine does not offer them."""
    placement: ClassVar[str] = "host"
    """``host`` or ``device``: a host drafter must see sampled tokens before the next step, which costs overlap; the
    report says so.
    """
    graph_support: ClassVar[GraphSupport] = GraphSupport.NONE
    trees: ClassVar[bool] = False

    @classmethod
    def cache_specs(cls, request: DrafterRequest) -> Sequence[CacheSpec]:
        """Return caches of the drafter's own layers, which join the one memory plan."""
        return ()

    @classmethod
    @abstractmethod
    def build(cls, env: DrafterEnv) -> Drafter:
        """Return the drafter of one engine."""

    @abstractmethod
    def propose(self, batch: DraftBatch) -> Drafts:
        """Return drafts for every sequence of the batch. Ids outside the vocabulary are dropped by the core."""

    def observe(self, outcome: DraftOutcome) -> None:
        """Learn how many drafts were kept."""

    def forget(self, slots: Sequence[int]) -> None:
        """Drop what is remembered of requests that ended."""
