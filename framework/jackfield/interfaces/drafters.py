"""Drafter: proposes tokens that the target verifies (speculative decoding). Group ``jackfield.drafters.v1``.

Verification is the core's: whatever a drafter proposes, the tokens that come out follow the target's distribution. A
drafter can only make the engine faster or
slower.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.interfaces.attention import GraphSupport
from jackfield.interfaces.building import ForwardContext
from jackfield.interfaces.plugin import Option, Plugin, Request, Settings
from jackfield.interfaces.training import DraftTrainer, TrainerEnv

if TYPE_CHECKING:
    import numpy as np
    import torch

NEEDS = frozenset({"tokens", "last_hidden", "taps", "draft_checkpoint", "draft_layers", "draft_cache"})
"""What a drafter may need of the engine. ``draft_layers`` are those of the target's own checkpoint that only draft
(``ModelArchitecture.draft_layers``): :attr:`DrafterEnv.build` returns them as the draft model.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterRequest(Request):
    """Asks for a drafter. ``kind`` is the method that the user named.

    Args:
        num_tokens: drafts per step that the user asked for.
        target_architecture: of the model that verifies. vocab_size, target_layers, hidden_size: of the target.
        offers: which of :data:`NEEDS` this engine and target can supply.
        model: the draft checkpoint, or ``""``.
    """

    num_tokens: int = 0
    target_architecture: str = ""
    vocab_size: int = 0
    target_layers: int = 0
    hidden_size: int = 0
    offers: frozenset[str] = frozenset()
    model: str = ""


class DraftDraw(Protocol):
    """Draws drafts by the sampling parameters of their requests."""

    def __call__(self, logits_BV: torch.Tensor, place: int) -> torch.Tensor:
        """Return [B] draft ids (int64) for one place of every sequence of the batch.

        Greedy requests get the largest logit. For others the request's temperature, min_p, top_k and top_p are applied
        and a token is drawn; the core remembers the distribution and verifies the draft by it, as long as the drafter
        returns the id unchanged.

        Args:
            logits_BV: over the target's vocabulary; minus infinity where the draft model has no such token. place: of
                the drafts, from 0; each place is drawn once, in order.
        """
        ...


@dataclass(slots=True)
class TargetStep:
    """What the target computed in a step. B sequences, T tokens.

    Args:
        slots: [B]. starts: [B] position of each sequence's first token of the step. counts: [B] its tokens that count:
            refused drafts are left out. samples: [B] whether the step sampled for it; others are in the middle of
            their prompt.
        first: [B] index of each sequence's first token among all of the step.
        hidden: [T, E] final hidden states of all tokens.
        taps: [T, E] residual streams behind the layers that the drafter's ``taps`` name, in their order.
    """

    slots: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    counts: np.ndarray[Any, Any]
    samples: np.ndarray[Any, Any]
    first: np.ndarray[Any, Any]
    hidden: torch.Tensor
    taps: Sequence[torch.Tensor] = ()


@dataclass(slots=True)
class DraftPass:
    """What one forward pass of a draft model needs. B sequences, T tokens.

    Args:
        order: [B] the sequences in the order of the pass. positions, ids, next_ids: [T] int64: positions of the tokens,
            what stands there in the sequences, and what stands behind each. ends: [B] index after each one's last
            token. context: for the model's layers.
    """

    order: np.ndarray[Any, Any]
    positions: torch.Tensor
    ids: torch.Tensor
    next_ids: torch.Tensor
    ends: np.ndarray[Any, Any]
    context: ForwardContext


@dataclass(slots=True)
class RecordedPass:
    """What a recorded pass of a draft model needs. T tokens; fields as in :class:`DraftPass`."""

    positions: torch.Tensor
    ids: torch.Tensor
    next_ids: torch.Tensor
    context: ForwardContext


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRound:
    """What the target computed in a recorded round of speculation, all on the device. B sequences, N tokens of each:
    the last one that was known, and its drafts.

    Args:
        slots, starts: [B] int64: request slots, and the position of each sequence's first token of the round.
        kept: [B] drafts that were kept: what lies behind them counts for nothing. room: [B] most drafts to propose.
        last_tokens: [B] the token behind the last draft that was kept, at position ``starts + 1 + kept``.
        hidden: [B, N, E] final hidden states. taps: [B, N, E] as in :class:`TargetStep`.
        tokens: [slots, length] int32, the text of all requests, ``last_tokens`` in it; read-only.
        num_drafts: K. rows, places: [B] and [K] int64, the numbers from 0 on.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    kept: torch.Tensor
    room: torch.Tensor
    last_tokens: torch.Tensor
    hidden: torch.Tensor
    taps: Sequence[torch.Tensor]
    tokens: torch.Tensor
    num_drafts: int
    rows: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What tokens see in a pass of drafts that branch, [T] each: as in :class:`jackfield.interfaces.TreeMask`, on the
    host. Drafts of earlier passes count as known at the places where they are stored, so that a model with windows or
    linear biases has no trees.

    Args:
        base: int32, tokens of the sequence that are all seen. bits: int64, of what is stored behind them. positions:
            int64, in the text.
    """

    base: np.ndarray[Any, Any]
    bits: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any]


class DraftModel(Protocol):
    """A draft checkpoint's model, with weights and a cache of its own over the blocks of the target's sequences: there
    is room for the tokens that a step samples and for all drafts behind them.
    """

    max_length: int
    """Longest sequence that the model was made for."""
    max_tokens: int
    """Most tokens of a pass."""
    module: Any
    """The model as its architecture built it, for drafters that bring the architecture."""

    def run(
        self,
        slots: np.ndarray[Any, Any],
        starts: np.ndarray[Any, Any],
        counts: np.ndarray[Any, Any],
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute tokens and return [B, E] the hidden state of each sequence's last one. In as many passes as a step's
        token budget asks for.

        Args:
            slots: [B]. starts: [B] positions of the first tokens. counts: [B] at least 1. ids: [B] tokens on the
                device, where ``counts`` are 1; None: those of the sequences.
        """
        ...

    def begin(
        self,
        slots: np.ndarray[Any, Any],
        starts: np.ndarray[Any, Any],
        counts: np.ndarray[Any, Any],
        tree: DraftTree | None = None,
    ) -> DraftPass:
        """Return what a pass over such tokens needs, for drafters that call ``module`` by themselves.

        Args:
            tree: where drafts branch: ``starts`` say where tokens are stored, which is no longer their position; all
                ``counts`` are the same then.
        """
        ...

    def recorded(
        self, slots_B: torch.Tensor, starts_B: torch.Tensor, counts_B: torch.Tensor, width: int = 1, shift: int = 0
    ) -> RecordedPass:
        """Return what a recorded pass over ``width`` tokens of each sequence needs, for drafters that call ``module``.

        Args:
            slots_B, starts_B: int64. counts_B: int64, how many of each sequence's tokens count; keys and values of the
                others are not kept, and their position is 0. shift: begin so many tokens later, with so many fewer that
                count.
        """
        ...

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """Return [B, V] logits over the target's vocabulary; minus infinity for tokens that the draft model lacks."""
        ...


@dataclass(slots=True)
class DraftBatch:
    """The sequences that want drafts. B sequences, one entry each.

    Args:
        slots: request slots, stable while a request lives.
        token_ids: host view [slots, max_length] int32 of prompt and output tokens, read-only (None for device
            drafters).
        lengths: [B] tokens of each sequence so far.
        limits: [B] most drafts that are useful for each sequence (its remaining length, and what pays by measurement).
        draw: for drafters that have logits.
        hidden: [B, E] the final hidden states that the last tokens were sampled from.
        last_tokens: [B] int64, the last sampled tokens on the device.
    """

    slots: np.ndarray[Any, Any]
    token_ids: np.ndarray[Any, Any] | None
    lengths: np.ndarray[Any, Any]
    limits: np.ndarray[Any, Any]
    hidden: torch.Tensor | None = None
    last_tokens: torch.Tensor | None = None
    draw: DraftDraw | None = None


@dataclass(slots=True)
class Drafts:
    """Proposed tokens.

    Args:
        ids: [B, K] token ids; rows are padded with -1 behind their last draft.
        parents: [B, K] index of each draft's parent in its row (-1: the last token), where drafts branch: parents come
            before children; None for chains.
        probabilities: [B, K, V] the distribution each draft was drawn from, given its parent and the children of it
            before, for drafters that draw by themselves; None when drafts are certain (point masses) or came from
            ``DraftBatch.draw``.
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
        target: the target model, for sharing embedding and head. build: returns the draft checkpoint's model, for
            drafters that need ``draft_checkpoint`` or ``draft_layers``.
    """

    request: DrafterRequest
    max_sequences: int
    max_length: int
    device: Any = None
    settings: Settings = field(default_factory=Settings)
    target: Any = None
    build: Callable[[], DraftModel] | None = None


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
    """``UNIFORM`` where it has a :meth:`draft`, for chains: rounds are then recorded with their drafting, and one may
    be launched before the host knows what the one before it kept.
    """
    taps: Sequence[int] = ()
    """Layers of the target whose residual streams :meth:`follow` is given (``needs`` has ``taps``); set when built."""
    draws: ClassVar[bool] = False
    """Whether drafts are drawn from distributions (``DraftBatch.draw`` or ``Drafts.probabilities``). Which tokens a
    seed gives then depends on the number of drafts, which for requests with seeds is kept steady.
    """
    trainable: ClassVar[bool] = False
    """Whether it has a :meth:`trainer`, for ``jackfield train-drafter``."""
    training_options: ClassVar[Mapping[str, Option]] = {}
    """What users may set when one is trained, by name."""

    @classmethod
    def branches(cls, settings: Settings) -> bool:
        """Return whether drafts may branch (``Drafts.parents``) with these options. Attention must be made for it, and
        the number of drafts is then that of all branches together, at most :data:`MOST_BRANCHES`.
        """
        return False

    @classmethod
    def architecture(cls, name: str) -> str:
        """Return which architecture builds a draft checkpoint whose config.json names ``name``: drafters that bring
        modules of their own are often saved under the name of their target's.
        """
        return name

    @classmethod
    def completed(cls, config: Mapping[str, Any], request: DrafterRequest) -> Mapping[str, Any]:
        """Return the keys of a draft checkpoint's config.json, with those that it leaves to its target's: checkpoints
        of heads alone may not say how wide they are.
        """
        return config

    @classmethod
    @abstractmethod
    def build(cls, env: DrafterEnv) -> Drafter:
        """Return the drafter of one engine."""

    @classmethod
    def trainer(cls, env: TrainerEnv) -> DraftTrainer:
        """Return what trains a draft checkpoint for a target. Random numbers are torch's own, seeded by the caller."""
        raise NotImplementedError(f"{cls.__name__} is trainable and has no trainer")

    @abstractmethod
    def propose(self, batch: DraftBatch) -> Drafts:
        """Return drafts for every sequence of the batch. Ids outside the vocabulary are dropped by the core, with all
        behind them. A drafter that raises, or returns what is no draft at all, is switched off and named in the log;
        requests go on without drafts.
        """

    def draft(self, step: DraftRound) -> torch.Tensor:
        """Return drafts [B, K] int64 behind a recorded round, -1 behind each sequence's last, the likeliest tokens.

        It is called while a graph is recorded, and never at a replay: device work alone, with sizes that do not depend
        on data. What :meth:`follow` would see of the round is seen here; :meth:`propose` and :meth:`follow` go on to
        serve steps that are not recorded.
        """
        raise NotImplementedError(f"{self.name} cannot be recorded")

    def follow(self, step: TargetStep) -> None:
        """See what the target computed, before drafts for its sequences are asked for. Called after every step where
        the drafter needs ``last_hidden`` or ``taps``, else after all but recorded steps of single tokens.
        """

    def observe(self, outcome: DraftOutcome) -> None:
        """Learn how many drafts were kept."""

    def forget(self, slots: Sequence[int]) -> None:
        """Drop what is remembered of requests that ended."""
