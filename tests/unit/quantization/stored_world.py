"""One layer, built and filled as the engine does it, out of checkpoint tensors in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from jackfield.distributed import SingleCommunicator
from jackfield.interfaces import (
    LayerInfo,
    LinearScheme,
    ModelFacts,
    MoEConfig,
    OutputShard,
    Parallel,
    QuantizationMethod,
    RowSlice,
    TensorFacts,
    WeightMap,
    WeightRule,
)
from jackfield.layers.builder import BuildPlan, LayerBuilder
from jackfield.layers.linear import Linear
from jackfield.layers.moe import Moe
from jackfield.loader import load_weights
from jackfield.registry import Registry
from jackfield_moe.torch_experts import TorchExperts
from jackfield_ops.torch_ops import TorchOps
from jackfield_quantization.unquantized import Unquantized

Tensors = Mapping[str, torch.Tensor]
PATH = "model.layers.0.self_attn"
EXPERTS = "model.layers.0.mlp.experts"


class Rank(SingleCommunicator):
    """One of several ranks; nothing is exchanged."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size


class Checkpoint:
    """Tensors in memory, as the loader takes them."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.facts = ModelFacts("memory", "safetensors", "Test", tensors=facts_of(tensors))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self._tensors[name]


def facts_of(tensors: Tensors) -> dict[str, TensorFacts]:
    """Return what headers would say."""
    return {n: TensorFacts(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}


@cache
def method_named(name: str) -> type[QuantizationMethod]:
    """Return a method by the name of its entry point."""
    (ref,) = [ref for ref in Registry.discover().refs("quantization_methods") if ref.name == name]
    found: type[QuantizationMethod] = ref.load()
    return found


def builder(
    method: type[QuantizationMethod],
    config: Mapping[str, Any],
    tensors: Tensors,
    weights: WeightMap,
    rank: Rank,
    dtype: torch.dtype = torch.float32,
) -> LayerBuilder:
    """Return what makes layers for a rank."""
    spec = method.parse(config)

    def plain(info: LayerInfo) -> LinearScheme:
        return Unquantized.scheme(info, None)

    plan = BuildPlan(
        dtype=dtype,
        device=torch.device("cpu"),
        communicator=rank,
        scheme=lambda info: method.scheme(info, spec),
        plain=plain,
        attention={},
        ops={op: TorchOps.build(op, None, None) for op in ("silu_and_mul", "route_experts")},
        experts=TorchExperts,
        weights=weights,
        tensors=facts_of(tensors),
    )
    return LayerBuilder(plan)


def linear(
    method: type[QuantizationMethod],
    config: Mapping[str, Any],
    tensors: Tensors,
    inputs: int,
    shards: Sequence[OutputShard],
    *,
    parallel: Parallel = Parallel.REPLICATED,
    rank: Rank | None = None,
    fused: str = "",
    path: str = PATH,
    dtype: torch.dtype = torch.float32,
) -> Linear:
    """Return a filled layer.

    Args:
        method, config: the format. tensors: by full name. inputs, shards, parallel, rank: of the layer; shards are
            checkpoint modules ``PATH.NAME``. fused: the one module that has all shards, where the checkpoint does so.
    """
    rules, start, total = [], 0, sum(shard.size for shard in shards)
    for shard in shards:
        cut = RowSlice(start, start + shard.size, total) if fused else None
        rules.append(WeightRule(f"{path}.{fused or shard.name}", "layer", shard.name, cut=cut))
        start += shard.size
    shared = method.shared_tensors(facts_of(tensors), method.parse(config))
    weights = shared.added_to(WeightMap(tuple(rules)))
    made = builder(method, config, tensors, weights, rank or Rank(), dtype)
    layer = made.linear("layer", inputs, shards, parallel=parallel)
    holder = nn.Module()
    holder.add_module("layer", layer)
    load_weights(holder, Checkpoint(tensors), weights)
    return layer


def named(path: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by full name."""
    return {f"{path}.{suffix}": tensor for suffix, tensor in tensors.items()}


def moe(
    method: type[QuantizationMethod],
    config: Mapping[str, Any],
    tensors: Tensors,
    block: MoEConfig,
    rules: Sequence[WeightRule],
    rank: Rank | None = None,
) -> Moe:
    """Return filled experts at the path ``experts``."""
    weights = WeightMap(tuple(rules))
    made = builder(method, config, tensors, weights, rank or Rank()).moe("experts", block)
    holder = nn.Module()
    holder.add_module("experts", made)
    load_weights(holder, Checkpoint(tensors), weights)
    return made


def each_rule(count: int) -> list[WeightRule]:
    """Return where experts go that a checkpoint has one by one."""
    parts = {"gate_proj": ("gate_up", "gate"), "up_proj": ("gate_up", "up"), "down_proj": ("down", "")}
    return [
        WeightRule(f"{EXPERTS}.{i}.{name}", f"experts.{part}", shard, expert=i)
        for i in range(count)
        for name, (part, shard) in parts.items()
    ]


def with_config(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a configuration with changes."""
    return {**config, **changes}
