"""The build context: makes the layers a model file asks for, with everything that was decided inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from jackfield.errors import ConfigError
from jackfield.interfaces import (
    AttentionBackend,
    AttentionEnv,
    AttentionGroup,
    Communicator,
    LayerInfo,
    LinearScheme,
    MoEConfig,
    OutputShard,
    Parallel,
    RankInfo,
    TensorFacts,
    WeightMap,
)
from jackfield.interfaces.facts import split_name
from jackfield.interfaces.moe import ExpertsBackend, experts_request
from jackfield.layers.activation import GatedActivation, PlainActivation
from jackfield.layers.attention import Attention, EncoderAttention
from jackfield.layers.composite import Composite
from jackfield.layers.dual_chunk import DualChunkAttention, DualChunkRotary
from jackfield.layers.latent import IndexedLatentAttention, LatentAttention
from jackfield.layers.linear import Embedding, Head, Linear, ThenPlain
from jackfield.layers.moe import Moe
from jackfield.layers.norm import GatedNorm, HeadNorm, LayerNorm, RmsNorm
from jackfield.layers.parameters import CacheScales, PlainWeight, ShardedWeight
from jackfield.layers.recurrent import Recurrent
from jackfield.layers.rotary import Rotary
from jackfield.layers.rotary_fourier import FourierRotary, kept_waves
from jackfield.layers.side import SideStream

SchemeOf = Callable[[LayerInfo], LinearScheme | None]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The backend of one layer: the name of its metadata, the backend, and what it is built with."""

    name: str
    backend: type[AttentionBackend] | Composite
    env: AttentionEnv


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What was decided, as far as layers are concerned.

    Args:
        dtype, device: of the weights. communicator: of the tensor-parallel group.
        scheme: gives each layer its scheme (the chosen quantization method with its spec), or None to leave it alone.
        plain: gives the scheme of layers that were left alone.
        attention: the backend of each layer.
        ops: chosen op implementations. experts: experts backend class, or None when the model has none.
        weights: where checkpoint tensors go. tensors: facts of the checkpoint's tensors. max_length: longest sequence
            that will be run, or 0 for the longest that the model was made for. batch_invariant: as in LayerInfo.
        cache_scales: module paths of scales of cached keys and values by layer, where the checkpoint has some.
        named_ops: ops whose implementation the user named: they run as they are, not folded into another kernel.
    """

    dtype: torch.dtype
    device: torch.device
    communicator: Communicator
    scheme: SchemeOf
    plain: Callable[[LayerInfo], LinearScheme]
    attention: Mapping[int, LayerAttention]
    ops: Mapping[str, Callable[..., Any]]
    experts: type[ExpertsBackend] | None = None
    weights: WeightMap = field(default_factory=lambda: WeightMap(()))
    tensors: Mapping[str, TensorFacts] = field(default_factory=dict)
    max_length: int = 0
    batch_invariant: bool = False
    cache_scales: Mapping[int, str] = field(default_factory=dict)
    named_ops: frozenset[str] = frozenset()


class LayerBuilder:
    """Implements :class:`jackfield.interfaces.BuildContext`."""

    def __init__(self, plan: BuildPlan) -> None:
        self._plan = plan
        self.dtype, self.device = plan.dtype, plan.device
        self._rank = RankInfo(plan.communicator.rank, plan.communicator.size)
        self._sources, self._facts = _known_of_targets(plan.weights, plan.tensors)
        self._rotaries: dict[str, Rotary | FourierRotary] = {}
        self._chunked: dict[tuple[int, int, int], DualChunkRotary] = {}
        self._side: SideStream | None = None
        self.quantized = 0
        """Layers that the quantization method took."""

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
    ) -> Linear:
        """See BuildContext."""
        shards = (OutputShard("", outputs),) if isinstance(outputs, int) else tuple(outputs)
        info = self._info(name, input_size, shards, parallel, "linear", input_unit=input_unit, bias=bias)
        if dtype is not None:
            info = replace(info, dtype=str(dtype).removeprefix("torch."))
        scheme = self._scheme(info) if quantized else self._plan.plain(info)
        return Linear(info, scheme, self._plan.communicator, self.device)

    def embedding(self, name: str, rows: int, size: int) -> Embedding:
        """See BuildContext."""
        info = self._info(name, size, (OutputShard("", rows),), self._vocabulary_split(rows), "embedding")
        return Embedding(info, self._scheme(info), self._plan.communicator, self.device)

    def head(self, name: str, rows: int, size: int, *, bias: bool = False, tied: Any | None = None) -> Head:
        """See BuildContext."""
        info = self._info(name, size, (OutputShard("", rows),), self._vocabulary_split(rows), "head", bias=bias)
        return Head(info, self._scheme(info), self._plan.communicator, self.device, tied)

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
        """See BuildContext."""
        dtype, device = self.dtype, self.device
        if over is not None:
            return HeadNorm(name, over, size, eps, kind, self._plan.communicator, dtype, device)
        if kind == "layer":
            return LayerNorm(name, size, eps, dtype, device, offset, weight=weight, bias=bias)
        foldable = not self._plan.named_ops & {"rms_norm", "fused_add_rms_norm"}
        return RmsNorm(name, size, eps, self._plan.ops, dtype, device, offset, weight=weight, foldable=foldable)

    def rotary(
        self,
        rotary_dim: int,
        *,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_position: int,
        heads: int = 0,
        reach: int = 0,
    ) -> Rotary | FourierRotary:
        """See BuildContext."""
        kind = sorted((scaling or {}).items(), key=lambda item: item[0])
        key = repr((rotary_dim, theta, kind, max_position, reach))
        if key not in self._rotaries:
            length = self._plan.max_length or max_position
            self._rotaries[key] = (
                self._fourier(rotary_dim, theta, scaling, max_position, heads)
                if scaling and scaling.get("use_fope")
                else Rotary(rotary_dim, theta, scaling, max_position, self.device, length, reach)
            )
        return self._rotaries[key]

    def _fourier(
        self, rotary_dim: int, theta: float, scaling: Mapping[str, Any], max_position: int, heads: int
    ) -> FourierRotary:
        """Return the one Fourier embedding of a model: the checkpoint has one set of coefficients."""
        if not heads or any(isinstance(other, FourierRotary) for other in self._rotaries.values()):
            raise ConfigError(
                "the model's layers cannot share one Fourier position embedding",
                field="rope_scaling.use_fope",
                value=True,
                remedy="use a plugin that knows this model's embeddings",
            )
        if self._plan.batch_invariant:
            raise ConfigError(
                "how a Fourier position embedding is rounded depends on how many tokens a step has",
                field="model.batch_invariant",
                value=True,
                remedy="leave model.batch_invariant out",
            )
        waves = kept_waves(rotary_dim, theta, scaling, max_position)
        shape: tuple[int, ...] = (len(waves), len(waves))
        shards: tuple[OutputShard, ...] = ()
        if scaling.get("fope_sep_head"):
            shape, shards = (heads, *shape), (OutputShard("", heads, may_replicate=True),)
        shapes = {"cos_coef": shape, "sin_coef": shape}
        coefficients = self.parameters("rotary", shapes, shards=shards, dtype=torch.float32)
        return FourierRotary(waves, coefficients, rotary_dim, scaling, max_position, self.device)

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
    ) -> Attention:
        """See BuildContext."""
        choice = self._plan.attention[layer]
        heads, kv_heads = self.local_heads(group.num_heads), self.local_kv_heads(group.num_kv_heads)
        scales = self._cache_scales(layer, group)
        env = _with_scales(self._with_slopes(choice.env, group, heads), scales)
        if sinks is not None:
            env = replace(env, sinks=sinks.weight)
        part = choice.backend.layer(env, layer)
        module = EncoderAttention if group.kind == "encoder" else Attention
        if "dual_chunk" in env.request.needs:
            module, rotary = DualChunkAttention, self._by_chunk(rotary, group)
        made = module(
            layer,
            choice.name,
            group,
            part,
            heads,
            kv_heads,
            self._plan.ops,
            rotary,
            q_norm,
            k_norm,
            norm_last=norm_last,
            fused=choice.backend.prepares,
        )
        made.add_module("cache_scales", scales)
        return made

    def _by_chunk(self, rotary: Rotary, group: AttentionGroup) -> DualChunkRotary:
        """Return the angles of a rotary embedding chunk by chunk; one for all layers, so that a step looks them up
        once.
        """
        chunk, reach = (int(group.extra[name]) for name in ("chunk_length", "chunk_reach"))
        key = (id(rotary), chunk, reach)
        if key not in self._chunked:
            self._chunked[key] = DualChunkRotary(rotary, chunk, reach)
        return self._chunked[key]

    def latent_attention(self, layer: int, group: AttentionGroup, *, kv_up: Any, rotary: Any) -> LatentAttention:
        """See BuildContext."""
        choice = self._plan.attention[layer]
        heads, rope = self.local_heads(group.num_heads), int(group.extra["rope_size"])
        sizes = (group.head_size - rope, rope, group.value_head_size)
        scales = self._cache_scales(layer, group)
        part = choice.backend.layer(_with_scales(choice.env, scales), layer)
        module = IndexedLatentAttention if "index_topk" in group.extra else LatentAttention
        made = module(layer, choice.name, part, kv_up, heads, sizes, rotary, self._plan.ops["rotary"])
        made.add_module("cache_scales", scales)
        return made

    def recurrent(self, layer: int) -> Recurrent:
        """See BuildContext."""
        choice = self._plan.attention[layer]
        return Recurrent(layer, choice.name, choice.backend.layer(choice.env, layer))

    def parameters(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        shards: Sequence[OutputShard] = (),
        dtype: torch.dtype | None = None,
    ) -> ShardedWeight | PlainWeight:
        """See BuildContext."""
        if not shards:
            return PlainWeight(name, shapes, dtype or self.dtype, self.device)
        return ShardedWeight(name, shapes, shards, self._rank, dtype or self.dtype, self.device)

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
    ) -> GatedNorm:
        """See BuildContext."""
        return GatedNorm(
            name,
            shard,
            size or shard.size,
            eps,
            self._plan.communicator,
            self.dtype,
            self.device,
            activation=activation,
            gate_first=gate_first,
            shared=shared,
        )

    def activation(self, name: str, *, gated: bool = True) -> GatedActivation | PlainActivation:
        """See BuildContext."""
        return GatedActivation(name, self._plan.ops, self._plan.named_ops) if gated else PlainActivation(name)

    def moe(self, name: str, config: MoEConfig) -> Moe:
        """See BuildContext."""
        if self._plan.experts is None:
            raise ConfigError("the model has experts, but no experts backend was chosen", field="moe", value=name)
        width, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
        shards = tuple(OutputShard(s, inner) for s in (("gate", "up") if config.gated else ("up",)))
        whole = (OutputShard("", width),)
        options: dict[str, Any] = {"role": "experts", "bias": config.bias, "num_experts": count}
        up_info = self._info(f"{name}.gate_up", width, shards, Parallel.COLUMN, **options)
        down_info = self._info(f"{name}.down", inner, whole, Parallel.ROW, **options)
        up, down = ((info, self._scheme(info)) for info in (up_info, down_info))
        request = experts_request(
            config, up[1].layout, dtype=str(self.dtype).removeprefix("torch."), ranks=self._rank.size
        )
        backend, group = self._plan.experts.build(request), self._plan.communicator
        if self._side is None:
            self._side = SideStream(self.device)
        return Moe(name, config, up, down, backend, group, self.device, ops=self._plan.ops, side=self._side)

    def local_heads(self, heads: int) -> int:
        """See BuildContext."""
        if heads % self._rank.size:
            raise ConfigError(
                f"{heads} attention heads cannot be divided among the ranks",
                field="parallel.tensor_parallel_size",
                value=self._rank.size,
                remedy=f"use a divisor of {heads}",
            )
        return heads // self._rank.size

    def local_kv_heads(self, heads: int) -> int:
        """See BuildContext."""
        size = self._rank.size
        if heads % size and size % max(1, heads):
            raise ConfigError(
                f"{heads} cache heads can neither be divided among the ranks nor copied to them evenly",
                field="parallel.tensor_parallel_size",
                value=size,
                remedy=f"use a divisor or a multiple of {heads}",
            )
        return max(1, heads // size)

    def _cache_scales(self, layer: int, group: AttentionGroup) -> CacheScales | None:
        """Return the module with the checkpoint's scales of a layer's cache, whether they are applied or not."""
        path = self._plan.cache_scales.get(layer)
        return None if path is None else CacheScales(path, group.num_kv_heads, self._rank, self.device)

    def _with_slopes(self, env: AttentionEnv, group: AttentionGroup, heads: int) -> AttentionEnv:
        """Give the backend this rank's slopes of linear biases, where the layer has some."""
        if "alibi" not in group.features:
            return env
        first = self._rank.rank * heads
        mine = group.extra["alibi_slopes"][first : first + heads]
        return replace(env, alibi_slopes=torch.tensor(mine, dtype=torch.float32, device=self.device))

    def _vocabulary_split(self, rows: int) -> Parallel:
        # A vocabulary that does not divide is kept whole on every rank: correct, and rare enough not to pad for.
        return Parallel.COLUMN if rows % self._rank.size == 0 else Parallel.REPLICATED

    def _info(
        self,
        name: str,
        input_size: int,
        shards: tuple[OutputShard, ...],
        parallel: Parallel,
        role: str,
        *,
        input_unit: int = 1,
        bias: bool = False,
        num_experts: int = 0,
    ) -> LayerInfo:
        info = LayerInfo(
            name,
            input_size,
            shards,
            parallel,
            input_unit,
            bias,
            str(self.dtype).removeprefix("torch."),
            role,
            rank=self._rank,
            num_experts=num_experts,
            batch_invariant=self._plan.batch_invariant,
        )
        return replace(info, sources=self._sources.get(name, {}), tensors=self._facts.get(name, {}))

    def _scheme(self, info: LayerInfo) -> LinearScheme:
        found = self._plan.scheme(info)
        if found is None:
            return self._plan.plain(info)
        self.quantized += 1
        return ThenPlain(found, self._plan.plain(info)) if found.becomes_dense else found


def _with_scales(env: AttentionEnv, scales: CacheScales | None) -> AttentionEnv:
    """Give the backend the scales of the layer's cache, where it is to apply some."""
    if scales is None or "cache_scales" not in env.request.needs:
        return env
    return replace(env, k_scale=scales.k_scale, v_scale=scales.v_scale)


def _known_of_targets(
    weights: WeightMap, tensors: Mapping[str, TensorFacts]
) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, dict[str, TensorFacts]]]]:
    """Return the source of each shard of each target, one that is there before others, and the facts of its tensors by
    suffix.
    """
    modules = _tensors_by_module(tensors)
    sources: dict[str, dict[str, str]] = {}
    facts: dict[str, dict[str, dict[str, TensorFacts]]] = {}
    for rule in weights.rules:
        source, found = rule.source, _facts_of(rule.source, rule.suffix, modules, tensors)
        if not found and source.startswith(weights.droppable):
            short = source.removeprefix(weights.droppable)
            found = _facts_of(short, rule.suffix, modules, tensors)
            source = short if found else source
        known = facts.setdefault(rule.target, {}).setdefault(rule.shard, {})
        named = sources.setdefault(rule.target, {})
        if rule.shard not in named or (found and not known):
            named[rule.shard] = source
        for suffix, fact in found.items():
            known.setdefault(suffix, fact)
    return sources, facts


def _facts_of(
    source: str, suffix: str, modules: Mapping[str, Mapping[str, TensorFacts]], tensors: Mapping[str, TensorFacts]
) -> Mapping[str, TensorFacts]:
    """Return what a rule's source has: the tensors of a module, or one tensor."""
    if source in modules:
        return modules[source]
    return {suffix: tensors[source]} if source in tensors else {}


def _tensors_by_module(tensors: Mapping[str, TensorFacts]) -> dict[str, dict[str, TensorFacts]]:
    found: dict[str, dict[str, TensorFacts]] = {}
    for name, facts in tensors.items():
        module, suffix = split_name(name, tensors)
        found.setdefault(module, {})[suffix] = facts
    return found
