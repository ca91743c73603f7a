"""What models are built from: groups of attention layers, the parts a build context makes, and what a forward pass
knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from jackfield.interfaces.moe import MoEConfig
from jackfield.interfaces.sharding import OutputShard, Parallel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionGroup:
    """Layers that are alike to an attention backend.

    Args:
        name: unique in the model (``full``, ``sliding``). long_features: what only texts longer than so many tokens
            need; asked for where the engine takes such. Other fields as in AttentionRequest.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    value_head_size: int = 0
    scale: float = 1.0
    window: int | None = None
    softcap: float = 0.0
    features: frozenset[str] = frozenset()
    extra: Mapping[str, Any] = field(default_factory=dict)
    long_features: Mapping[str, int] = field(default_factory=dict)


class ForwardContext(Protocol):
    """All that a forward pass needs besides its inputs; passed down explicitly. There is no global."""

    def metadata(self, group: str) -> Any:
        """Return the attention metadata of a group of layers."""
        ...

    def cache(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return the cache planes of a layer."""
        ...

    def slots(self, group: str) -> torch.Tensor:
        """Return [T] cache slots of the new tokens for a group of layers."""
        ...

    @property
    def adapters(self) -> torch.Tensor | None:
        """[T] adapter index of each token, or None when no adapter is active."""
        ...

    def unrecorded(self, group: str, work: Callable[[Any, int], None]) -> None:
        """Call ``work(metadata of the group, number of tokens)``: attention and its kin, whose sizes depend on the
        step. In a recorded step this is where recordings break; at a replay the tensors that ``work`` holds are
        longer than the step has tokens.
        """
        ...

    def angles(self, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [T, R] of a rotary embedding; computed once per step."""
        ...

    @property
    def token_types(self) -> torch.Tensor | None:
        """[T] which text of a pair each token belongs to, or None where the model does not tell them apart."""
        ...

    @property
    def taps(self) -> frozenset[int]:
        """Layers whose residual stream someone asked for; empty in most engines."""
        ...

    def tap(self, layer: int, hidden_TE: torch.Tensor) -> None:
        """Offer the residual stream after a layer to drafters; keeps it only where someone asked."""
        ...


class BuildContext(Protocol):
    """The building blocks a model is made of. Parallelism, quantization, adapters and backends are inside; a model
    file knows none of them.
    """

    dtype: torch.dtype
    device: torch.device

    def linear(
        self,
        name: str,
        input_size: int,
        outputs: int | Sequence[OutputShard],
        *,
        bias: bool = False,
        parallel: Parallel = Parallel.REPLICATED,
        input_unit: int = 1,
        quantized: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return a linear layer; ``name`` is its module path. Calling it maps [T, I] to [T, O] of this rank (ROW
        layers return the sum over ranks). ``quantized``: the quantization method may have it. ``dtype``: of the weight
        and what it is called with, where that is not the model's.
        """
        ...

    def embedding(self, name: str, rows: int, size: int) -> Any:
        """Return a vocabulary embedding: ids [T] → [T, size]."""
        ...

    def head(self, name: str, rows: int, size: int, *, bias: bool = False, tied: Any | None = None) -> Any:
        """Return the output projection: [T, size] → [T, rows], gathered over ranks; ``tied`` is the embedding it
        shares its weight with.
        """
        ...

    def norm(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        kind: str = "rms",
        offset: float = 0.0,
        weight: bool = True,
        bias: bool = True,
        over: OutputShard | None = None,
    ) -> Any:
        """Return a norm layer. ``norm(x)`` → y; ``norm.add(x, residual)`` → (norm(x + residual), x + residual).
        ``norm.feed(linear)`` says that one linear layer alone takes its results, so that they may be quantized for it.

        Args:
            name: module path. size: features that are normalized together. eps: added to the mean square.
            kind: ``rms`` or ``layer``. offset: added to the weight (Gemma, Nemotron). weight, bias: whether it
            has them; an ``rms`` has no bias. over: the shard of a COLUMN layer whose outputs [T, heads, D] are
            normalized, for norms that have a weight for each of its features: each head alone (``size`` is D) or all
            of them together (``size`` is the shard's), over all ranks. It has neither ``add`` nor ``feed``.
        """
        ...

    def rotary(
        self,
        rotary_dim: int,
        *,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_position: int,
        heads: int = 0,
        reach: int = 0,
    ) -> Any:
        """Return a rotary embedding of the first ``rotary_dim`` features; equal ones are shared. With ``use_fope`` in
        ``scaling`` it is a Fourier embedding, whose coefficients are parameters of the module path ``rotary``; it needs
        ``heads``, the cache heads. ``reach``: positions that are looked up, where those are not all (dual chunks).
        """
        ...

    def attention(
        self,
        layer: int,
        group: AttentionGroup,
        *,
        rotary: Any = None,
        q_norm: Any = None,
        k_norm: Any = None,
        norm_last: bool = False,
        sinks: Any = None,
    ) -> Any:
        """Return the attention of one layer: ``attention(qkv, positions, ctx)`` normalizes and rotates q and k, writes
        the cache and attends, [T, H·D + K·D + K·Dv] → [T, H·Dv]. It is one call so that a platform can fuse it.
        With ``norm_last`` it rotates before it normalizes. A group that needs ``alibi`` has the slopes of all heads in
        ``extra["alibi_slopes"]``. A group that needs ``sinks`` gets a module of :meth:`parameters` whose ``weight`` [H]
        is a logit that takes part in each head's softmax and adds nothing.
        """
        ...

    def latent_attention(self, layer: int, group: AttentionGroup, *, kv_up: Any, rotary: Any) -> Any:
        """Return multi-head latent attention of one layer: ``attention(q, latent, rope, positions, ctx)``, with q
        [T, H, N + P] (rotated features last), latent [T, R], rope [T, P] → [T, H·V]. ``kv_up`` is the COLUMN layer
        [R] → [H·(N + V)]. The group has ``head_size`` N + P, and in ``extra`` ``latent_size`` R and ``rope_size`` P.

        Where the group has ``index_topk`` too, with ``index_heads`` J and ``index_size`` I, the call takes
        ``index=(queries [T, J, I], keys [T, I], weights [T, J] in float32)`` besides: see IndexedLatentLayer. Of
        queries and keys the first P features are rotated, in halves.
        """
        ...

    def recurrent(self, layer: int) -> Any:
        """Return the mixing of a layer with states: ``convolve(x, weights, ctx)`` [T, C] → [T, C] and
        ``mix(tokens, constants, out, ctx)`` → out. What the states look like follows from the group's ``extra``, the
        names of inputs from its kind (docs/plugins/attention.md).
        """
        ...

    def parameters(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        shards: Sequence[OutputShard] = (),
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return a module with small parameters as attributes, by checkpoint suffix and shape; a tensor that a weight
        rule names whole has the suffix ``weight``.

        Args:
            name: module path. shapes: of the whole tensors. shards: what the first dimension is made of, where it is
            cut among ranks. dtype: storage type, if not the model's.
        """
        ...

    def gated_norm(
        self,
        name: str,
        shard: OutputShard,
        eps: float,
        *,
        size: int = 0,
        activation: str = "silu",
        gate_first: bool = True,
        shared: bool = False,
    ) -> Any:
        """Return a root-mean-square norm beside a gate, ``norm(x, gate)`` over the outputs [T, I] of a COLUMN layer's
        ``shard``.

        Args:
            name: module path. eps: added to the mean square. size: features normalized together, 0 for all.
            activation: of the gate, ``silu`` or ``sigmoid``. gate_first: the gate comes before the norm. shared: one
            weight of ``size`` for all groups.
        """
        ...

    def activation(self, name: str, *, gated: bool = True) -> Any:
        """Return an activation by its HF name, over fused gate and up (``[T, 2F] → [T, F]``, the activation of the gate
        times up) or, where it is not ``gated``, over each number (``[T, F] → [T, F]``). It has ``feed`` as norms have.
        """
        ...

    def moe(self, name: str, config: MoEConfig) -> Any:
        """Return a mixture-of-experts block: ``moe(x, router_logits, choice_bias, shared)`` → [T, E].

        ``choice_bias`` [X] is added to scores where experts are chosen, and nowhere else; ``shared`` is a module whose
        results are added, beside the experts where the device can do two things at once. Both may be None.
        """
        ...

    def local_heads(self, heads: int) -> int:
        """Return how many of ``heads`` query heads this rank computes."""
        ...

    def local_kv_heads(self, heads: int) -> int:
        """Return how many of ``heads`` cache heads this rank holds (at least 1)."""
        ...
