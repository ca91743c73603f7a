"""Training of draft checkpoints. The core reads texts, runs the target on them and steps the optimizer; the drafter
says what is learnt, and how it is stored.

Legend: N tokens or rows, B documents, L tokens of the longest, E width, V vocabulary, K drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.interfaces.building import AttentionGroup
from jackfield.interfaces.models import TextConfig
from jackfield.interfaces.plugin import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn


class TrainingTarget(Protocol):
    """The target, loaded. Nothing is learnt through it: results have no gradients."""

    def embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Return input embeddings [N, E], float32, of ids of any shape."""
        ...

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V], float32, of final hidden states."""
        ...

    def head(self, ids_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return [V, E] the weight of the output projection, dequantized where it is packed; [N, E] of some tokens."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerEnv:
    """What a trainer is made from.

    Args:
        target: the target. config: its sizes. keys: of its config.json (those of a GGUF file translated).
        groups: its layers that mix tokens.
        counts: [V] int64 on the host: how often each token occurs in the text.
        settings: the drafter's ``training_options``, those that users set included. device: where to train.
    """

    target: TrainingTarget
    config: TextConfig
    keys: Mapping[str, Any]
    groups: Sequence[AttentionGroup]
    counts: torch.Tensor
    device: Any = None
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Documents, and what the target computed of them. What lies behind the end of a document is 0.

    Args:
        ids: [B, L] int64. lengths: [B] int64 tokens of each document. hidden: [B, L, E] final hidden states, float32.
        taps: [B, L, E] residual streams behind the layers that the trainer's ``taps`` name, float32.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    hidden: torch.Tensor
    taps: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, slots=True)
class Agreement:
    """Where greedy drafts are what the target says, by rows (places of documents that drafts may begin at).

    Args:
        right: [N, K] bool. known: [N, K] bool: whether the document reaches so far; if not, ``right`` is False.
    """

    right: torch.Tensor
    known: torch.Tensor


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """A draft checkpoint.

    Args:
        config: what config.json says, ``architectures`` included. tensors: by name, on any device; those of floating
            point are stored in the type that the checkpoint is written in.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


class DraftTrainer(ABC):
    """Learns one draft checkpoint. Made anew for each."""

    module: nn.Module
    """What is learnt: its parameters with gradients, in float32, on the device that was asked for."""
    taps: Sequence[int] = ()
    """Layers of the target, from 0, whose residual streams batches have."""
    learning_rate: ClassVar[float] = 1e-3
    """The highest, where the user names none."""

    @abstractmethod
    def losses(self, batch: TrainingBatch) -> Iterator[torch.Tensor]:
        """Yield the loss (a scalar) in parts that add up to it. Gradients of each part are taken before the next one is
        made, so that what they need is in memory for one part at a time.
        """

    @abstractmethod
    def agreement(self, batch: TrainingBatch) -> Agreement:
        """Return how greedy drafts compare with the target's greedy tokens behind the same tokens of the document.
        Called without gradients.
        """

    @abstractmethod
    def checkpoint(self) -> TrainedDraft:
        """Return what was learnt so far, in the layout that the drafter reads."""
