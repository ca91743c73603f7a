"""AttentionBackend: how a layer mixes tokens and what state it keeps. Group ``jackfield.attention_backends.v1``.

One family covers softmax attention over a paged cache (MHA, GQA, MLA, windows, encoders), and recurrent mixing
(Mamba, linear attention): they differ in the
:class:`CacheSpec` they ask for and in the layer object they build. Dimension legend: T tokens of a step, B sequences
of a step, H query heads, K cache heads,
D head size, M blocks per sequence.

Tokens of a step lie one after another, sequence by sequence; sequences with one new token come first.
``step.query_start[b]`` is the first token of sequence b.
Causality is always explicit: it follows from the request's ``kind`` and never from a default.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.interfaces.cache import CacheSpec
from jackfield.interfaces.plugin import Plugin, Request, Settings
from jackfield.interfaces.sharding import RankInfo

if TYPE_CHECKING:
    import numpy as np
    import torch

PHASES = ("prefill", "decode")

KINDS = frozenset(
    {
        "full",  # causal over everything
        "sliding",  # causal over the last `window` tokens
        "chunked_local",  # causal inside aligned chunks of `window` tokens
        "encoder",  # bidirectional, nothing is kept
        "cross",  # over an encoder's output
        "mla",  # multi-head latent attention
        "mla_sparse",  # the same over few tokens, which an indexer chooses
        "mamba1",
        "mamba2",
        "linear",
        "gdn",
        "kda",
    }
)
"""Layer kinds of the project's own plugins. The vocabulary is open: a plugin and a model may agree on another word."""

FEATURES = frozenset(
    {
        "prefill",  # many new tokens of a sequence with nothing kept before
        "chunked_prefill",  # many new tokens after kept ones
        "decode",
        "mixed",  # both in one step
        "gqa",  # fewer cache heads than query heads
        "softcap",
        "sinks",
        "alibi",
        "tree",  # ancestor masks of draft trees
        "diff_kv",  # key and value head sizes differ
        "dual_chunk",  # queries come rotated three times, for keys of their own chunk, of the one before, of the others
        "sparse_prefill",  # long queries attend to the keys that matter most alone
        "cache_scales",  # the checkpoint's scales of keys and values in 8-bit floats
        "cache_fp8",
        "cache_int8",
        "lse",  # returns log-sum-exp, so that parts can be merged
    }
)


class GraphSupport(IntEnum):
    """In which steps a backend can be part of a recorded graph; the engine takes the minimum over all backends."""

    NONE = 0
    DECODE = 1
    UNIFORM = 2
    """Steps in which every sequence has the same number of new tokens (verification of drafts)."""
    FULL = 3


PROMPT_TOKENS = 128
"""A sequence that brings at least so many new tokens brings a part of its prompt: drafts are never so many."""


class HostLengths(Enum):
    """What a metadata builder must know about sequence lengths on the host. Exact lengths cost overlap; the report
    says so. Of sequences that bring :data:`PROMPT_TOKENS` or more, upper bounds are exact.
    """

    NONE = "none"
    UPPER_BOUND = "upper_bound"
    EXACT = "exact"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRequest(Request):
    """Asks for a backend for one group of like layers in one phase (or in both: ``phase=""``).

    Args:
        layers: indices of the layers.
        num_heads: query heads, all ranks together.
        num_kv_heads: cache heads, all ranks together.
        head_size: size of a query and key head.
        value_head_size: size of a value head.
        scale: factor on the scores.
        window: for ``sliding`` and ``chunked_local``.
        softcap: logits are ``softcap * tanh(logits / softcap)``; 0 for none.
        cache_dtype: storage type of the cache.
        block_size: block size that the user set, or ``None``.
        rank: this rank among those that share the heads.
        phase: ``prefill``, ``decode``, or ``""`` for a backend that serves both.
        extra: sizes of kinds that need more (``kv_lora_rank``, ``state_size``, ``conv_width``).
    """

    layers: tuple[int, ...] = ()
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    value_head_size: int = 0
    scale: float = 1.0
    window: int | None = None
    softcap: float = 0.0
    cache_dtype: str = ""
    block_size: int | None = None
    rank: RankInfo = RankInfo()
    phase: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def local_heads(self) -> int:
        """Query heads of this rank."""
        return self.num_heads // self.rank.size

    @property
    def local_kv_heads(self) -> int:
        """Cache heads of this rank; at least one, since ranks may hold copies."""
        return max(1, self.num_kv_heads // self.rank.size)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that will ever be built.

    Args:
        max_tokens: T. max_sequences: B. max_blocks: M. max_length: tokens of a sequence, old and new.
    """

    max_tokens: int
    max_sequences: int
    max_blocks: int
    max_length: int


MOST_BRANCHES = 63
"""Most drafts of a sequence that may branch in a step: as many as a signed 64-bit number has bits for."""


@dataclass(frozen=True, slots=True)
class TreeMask:
    """What new tokens see where drafts branch: only backends that declare ``tree`` are given steps with one.

    Drafts of a sequence are stored one after another behind its known tokens, parents before children, so that where a
    token is stored no longer says what comes before it. A token sees what is stored at places of its sequence below
    ``base``, and at place ``base + i`` where bit i of ``bits`` is set: its ancestors, and itself. Of a token that is no
    draft ``base`` is its own place plus 1, and no bit is set. ``AttentionStep.positions`` are those of the text: a
    draft's says how deep it is, and distances and windows are counted by them.

    Args:
        base: [T] int32. bits: [T] int64. base_host, bits_host: the same on the host. positions_host: [T] int64 the
            step's positions.
    """

    base: torch.Tensor
    bits: torch.Tensor
    base_host: np.ndarray[Any, Any]
    bits_host: np.ndarray[Any, Any]
    positions_host: np.ndarray[Any, Any]


@dataclass(slots=True)
class AttentionStep:
    """What one step looks like to one group of layers.

    Device tensors are int32 unless said otherwise; host arrays are numpy, and only those that the builder asked for
    are exact.

    Args:
        num_tokens: T.
        num_sequences: B.
        num_decodes: leading sequences with exactly one new token.
        max_query: largest number of new tokens of a sequence.
        max_length: upper bound of tokens (old and new) of a sequence.
        query_start: [B + 1] first new token of each sequence, then T.
        lengths: [B] tokens of each sequence after this step, old and new.
        block_table: [B, M] page of each block; entries past a sequence's end name any block, and must not
            be read into results.
        slots: [T] int64 ``page * block_size + offset`` of each new token; a negative slot is not written.
        positions: [T] int64 position of each new token in its sequence: where it is stored, but for ``tree``.
        query_start_host: [B + 1].
        lengths_host: [B] per the builder's ``host_lengths``: None, upper bounds, or exact.
        states: [B, 2] for recurrent layers, else None: the page that holds a sequence's state before the step (-1 when
            it begins here: the state is zero), and the page that takes the state after it. They may be the same.
        tree: where drafts branch, else None.
        causal: False only for the ``encoder`` and ``cross`` kinds.
    """

    num_tokens: int
    num_sequences: int
    num_decodes: int
    max_query: int
    max_length: int
    query_start: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    query_start_host: np.ndarray[Any, Any]
    lengths_host: np.ndarray[Any, Any] | None
    states: torch.Tensor | None = None
    tree: TreeMask | None = None
    causal: bool = True


class MetadataBuilder(Protocol):
    """Turns a step into whatever the backend's kernels want, once per step and group. Buffers are allocated once,
    so that graphs can be replayed.
    """

    host_lengths: HostLengths

    def allocate(self, limits: StepLimits) -> None:
        """Allocate buffers for the largest step. Called once, before the first build."""
        ...

    def build(self, step: AttentionStep) -> Any:
        """Return the metadata of ``step``; must not synchronize with the device."""
        ...

    def capture(self, num_sequences: int, max_query: int) -> Any:
        """Return metadata for recording a graph of that size; raises NotImplementedError when graph_support is NONE."""
        ...

    def advance(self, tokens: int) -> Any:
        """Return the metadata for the next draft step: each sequence is ``tokens`` longer; raises
        NotImplementedError when it cannot.
        """
        ...


class AttentionLayer(Protocol):
    """Softmax attention of one layer over its cache."""

    def write(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """Store keys and values of new tokens. ``cache`` maps plane names to tensors ``[pages, *plane shape]``."""
        ...

    def attend(
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: Any, out_THD: torch.Tensor
    ) -> None:
        """Attend from the new tokens over everything that is kept, new tokens included (``write`` ran before).
        Writes ``out``.
        """
        ...


class PreparingLayer(AttentionLayer, Protocol):
    """An attention layer that normalizes and rotates queries and keys and writes the cache in one kernel."""

    def prepare(
        self,
        qkv_TN: torch.Tensor,
        cos_sin_TR: torch.Tensor | None,
        q_weight_D: torch.Tensor | None,
        k_weight_D: torch.Tensor | None,
        eps: float,
        cache: Mapping[str, torch.Tensor],
        slots: torch.Tensor,
    ) -> None:
        """Do all that comes before ``attend``: norm (weights may be None), rotation (angles may be None), cache write.

        Queries are left in their place in ``qkv``; keys and values need not be.
        """
        ...


class EncoderLayer(Protocol):
    """Attention that keeps nothing (kinds ``encoder``; ``cross`` gets the encoder's keys and values)."""

    def attend_fresh(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, metadata: Any, out_THD: torch.Tensor
    ) -> None:
        """Attend inside each sequence of the step, causally or not as the metadata says. Writes ``out``."""
        ...


class LatentLayer(Protocol):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the cache holds a latent and a rotary key,
    shared by all heads.
    """

    def bind(self, kv_up: Any) -> None:
        """Receive the linear layer that expands the latent to keys and values; called once after weights are final."""
        ...

    def write(
        self, latent_TR: torch.Tensor, rope_TP: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """Store latents and rotary keys of new tokens."""
        ...

    def attend(
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: Any, out_THD: torch.Tensor
    ) -> None:
        """Attend; whether expanded or absorbed is the backend's choice per phase."""
        ...


class IndexedLatentLayer(Protocol):
    """Latent attention to few tokens, chosen for each query by an indexer (DeepSeek-V3.2, arXiv:2512.02556). Beside its
    latent each token keeps an index key; J index heads share it.

    Of the tokens that a query sees, those ``extra["index_topk"]`` are chosen whose score is largest: the sum over index
    heads of ``weight * max(0, query . key)``, in float32. Where it sees no more than that, it attends to all. Which of
    tokens with equal scores are chosen is the backend's choice.
    """

    def bind(self, kv_up: Any) -> None:
        """See LatentLayer."""
        ...

    def write(
        self, latent_TR: torch.Tensor, rope_TP: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """See LatentLayer."""
        ...

    def write_index(self, key_TI: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
        """Store index keys of new tokens."""
        ...

    def choose(
        self, q_TJI: torch.Tensor, weight_TJ: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: Any
    ) -> Any:
        """Return what each new token attends to, in a form that :meth:`attend_chosen` of the same backend takes in the
        same step, whichever layer's it is. ``weight`` is float32; factors on scores are in it.
        """
        ...

    def attend_chosen(
        self,
        q_THD: torch.Tensor,
        chosen: Any,
        cache: Mapping[str, torch.Tensor],
        metadata: Any,
        out_THD: torch.Tensor,
    ) -> None:
        """Attend to the chosen tokens. Writes ``out``."""
        ...


class RecurrentLayer(Protocol):
    """Mixing with a state per sequence (Mamba, linear attention, gated delta rule). ``metadata`` says where the states
    before and after the step lie: ``AttentionStep.states``.
    """

    def convolve(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        state: Mapping[str, torch.Tensor],
        metadata: Any,
        out_TC: torch.Tensor,
    ) -> None:
        """Write silu(causal convolution of each channel over its last W tokens) and advance the plane ``conv``."""
        ...

    def mix(
        self,
        inputs: Mapping[str, torch.Tensor],
        state: Mapping[str, torch.Tensor],
        metadata: Any,
        out: torch.Tensor,
    ) -> None:
        """Advance the states of all sequences by their new tokens and write the outputs. Names of inputs are fixed
        per kind in docs/plugins/attention.md.
        """
        ...

    def commit(self, state: Mapping[str, torch.Tensor], metadata: Any, accepted: torch.Tensor) -> None:
        """Make the state after ``accepted[b]`` draft tokens the current one of sequence b."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionEnv:
    """What a backend is given when it builds.

    Args:
        request: the request that was decided.
        spec: the cache spec that was agreed on.
        block_size: tokens in a block.
        device: where to allocate. settings: the plugin's options.
        sinks: [H] logits of attention sinks of the layer, bound by the model, or None.
        alibi_slopes: [H], or None.
        k_scale, v_scale: [K] float32, filled when weights are loaded; for requests that need ``cache_scales``, else
            None. A cache holds keys and values divided by them; of latents, ``k_scale`` is that of the latent.
    """

    request: AttentionRequest
    spec: CacheSpec
    block_size: int
    device: torch.device
    settings: Settings = field(default_factory=Settings)
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class AttentionBackend(Plugin):
    """One way to mix tokens. A minimal plugin declares kinds, features and dtypes, and writes cache_specs,
    metadata_builder and layer.
    """

    family: ClassVar[str] = "attention_backends"
    graph_support: ClassVar[GraphSupport] = GraphSupport.NONE
    host_lengths: ClassVar[HostLengths] = HostLengths.EXACT
    """The same as the builder's, for the report."""
    prepares: ClassVar[bool] = False
    """Whether its layers are :class:`PreparingLayer` objects."""

    @classmethod
    def recorded_query(cls, request: AttentionRequest) -> int:
        """Return up to how many new tokens of each sequence a step may have to be recorded, where all sequences have
        the same number: rounds of speculation are such steps.
        """
        if cls.graph_support >= GraphSupport.UNIFORM:
            return PROMPT_TOKENS - 1
        return int(cls.graph_support >= GraphSupport.DECODE)

    @classmethod
    @abstractmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return the cache layouts this backend can work on, best first; ``[CacheSpec(())]`` when nothing is kept."""

    @classmethod
    @abstractmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """Return a builder for one group of layers. Kernel libraries are imported here or in :meth:`layer`, not at
        the top of the module.
        """

    @classmethod
    @abstractmethod
    def layer(cls, env: AttentionEnv, index: int) -> Any:
        """Return the object for layer ``index``: an AttentionLayer, EncoderLayer, LatentLayer,
        IndexedLatentLayer or RecurrentLayer according to the kind.
        """
