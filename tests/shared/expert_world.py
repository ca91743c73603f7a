"""Blocks of experts with random weights, and what they must compute: a loop over pairs in float64."""

from __future__ import annotations

from typing import Any

import torch

from jackfield.distributed import SingleCommunicator
from jackfield.interfaces import ExpertsBackend, LayerInfo, MoEConfig, OutputShard, Parallel, QuantizationMethod
from jackfield.interfaces.moe import experts_request
from jackfield.layers.functional import REFERENCES
from jackfield.layers.moe import Moe
from jackfield.layers.routing import route
from jackfield_moe.activations import activation_of
from jackfield_moe.torch_experts import TorchExperts
from jackfield_quantization.unquantized import Unquantized

CPU = torch.device("cpu")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same normal numbers in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(config: MoEConfig) -> dict[str, torch.Tensor]:
    """Return the whole block's weights."""
    count, width, inner = config.num_experts, config.hidden_size, config.intermediate_size
    names = ("gate", "up") if config.gated else ("up",)
    found = {f"{name}.weight": numbers(count, inner, width, seed=len(name)) for name in names}
    found["down.weight"] = numbers(count, width, inner, seed=7)
    if config.bias:
        found |= {f"{name}.bias": numbers(count, inner, seed=10 + len(name)) for name in names}
        found["down.bias"] = numbers(count, width, seed=17)
    return found


def build(
    config: MoEConfig,
    backend: type[ExpertsBackend] = TorchExperts,
    method: type[QuantizationMethod] = Unquantized,
    *,
    partial: bool = False,
    **options: Any,
) -> Moe:
    """Return a block with all its weights; ``held`` says which experts it has."""
    held = options.get("held")
    count = config.num_experts if held is None else len(held)
    names = ("gate", "up") if config.gated else ("up",)
    shards = tuple(OutputShard(name, config.intermediate_size) for name in names)
    common: dict[str, Any] = {"bias": config.bias, "role": "experts", "num_experts": count}
    infos = (
        LayerInfo("moe.gate_up", config.hidden_size, shards, Parallel.COLUMN, **common),
        LayerInfo("moe.down", config.intermediate_size, (OutputShard("", config.hidden_size),), Parallel.ROW, **common),
    )
    schemes = [method.scheme(info, None) or Unquantized.scheme(info, None) for info in infos]
    request = experts_request(config, schemes[0].layout, dtype="float32", held=count, partial=partial)
    up, down = zip(infos, schemes, strict=True)
    block = Moe("moe", config, up, down, backend.build(request), SingleCommunicator(), CPU, ops=REFERENCES, **options)
    for name, tensor in weights_of(config).items():
        shard, _, suffix = name.partition(".")
        for expert, part in enumerate(tensor):
            target, place = (block.down, "") if shard == "down" else (block.gate_up, shard)
            assert target.load_expert(expert, place, suffix, part)
    for weight in (block.gate_up, block.down):
        assert weight.unfilled() == []
        weight.finalize()
    return block


def expected(
    config: MoEConfig, x: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [T, E] in float64, pair by pair."""
    weights, experts = route(logits, config, bias)
    stored = {name: tensor.double() for name, tensor in weights_of(config).items()}
    activation = activation_of(experts_request(config, "dense"))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, token in enumerate(x.double()):
        for weight, expert in zip(weights[row].double(), experts[row].tolist(), strict=True):
            if expert >= config.num_experts:
                out[row] += weight * token
                continue
            given = token * weight if config.weigh_input else token
            parts = [_product(stored, name, expert, given) for name in (("gate", "up") if config.gated else ("up",))]
            inner = activation(torch.cat(parts).unsqueeze(0))[0]
            result = _product(stored, "down", expert, inner)
            out[row] += result * (1.0 if config.weigh_input else weight)
    return out


def _product(stored: dict[str, torch.Tensor], name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    found = stored[f"{name}.weight"][expert] @ x
    return found + stored[f"{name}.bias"][expert] if f"{name}.bias" in stored else found
