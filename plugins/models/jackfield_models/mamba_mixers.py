"""Mamba layers in torch. Legend: T tokens, E width, I channels, N states, R rank, H heads, V head size, G groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield_models.mamba_parts import Mamba1Sizes, Mamba2Sizes


class Constants(nn.Module):
    """The parameters of a recurrence, in float32; decays as they are used."""

    def __init__(self, path: str, shapes: Mapping[str, tuple[int, ...]], shards: Any, ctx: BuildContext) -> None:
        super().__init__()
        for name, shape in shapes.items():
            module = ctx.parameters(f"{path}.{name}", {"weight": shape}, shards=shards, dtype=torch.float32)
            self.add_module(name, module)
        self._made: dict[str, torch.Tensor] = {}

    def forward(self) -> dict[str, torch.Tensor]:
        """Return the constants by the names that recurrences know; ``a`` is -exp(a_log)."""
        if not self._made:
            for name, module in self.named_children():
                weight = module.get_parameter("weight")
                self._made[name.removesuffix("_log")] = -weight.exp() if name == "a_log" else weight
        return self._made


def convolution(path: str, shards: Sequence[OutputShard], width: int, ctx: BuildContext, *, bias: bool) -> Any:
    """Return the weights of a short convolution of each channel."""
    channels = sum(shard.size for shard in shards)
    shapes: dict[str, tuple[int, ...]] = {"weight": (channels, 1, width)}
    if bias:
        shapes["bias"] = (channels,)
    return ctx.parameters(f"{path}.conv", shapes, shards=shards)


class Mamba1Mixer(nn.Module):
    """A selective state space: step sizes, B and C are computed from what the convolution gives."""

    def __init__(
        self, index: int, path: str, width: int, sizes: Mamba1Sizes, group: AttentionGroup, ctx: BuildContext
    ) -> None:
        super().__init__()
        inner, state, rank = sizes.inner, sizes.state, sizes.rank
        self._split = [rank, state, state]
        column, row = Parallel.COLUMN, Parallel.ROW
        self.inputs = ctx.linear(f"{path}.in", width, sizes.inputs, bias=sizes.bias, parallel=column)
        self.conv = convolution(path, sizes.convolved, sizes.width, ctx, bias=sizes.conv_bias)
        self.select = ctx.linear(f"{path}.select", inner, rank + 2 * state, parallel=row)
        self.dt = ctx.linear(f"{path}.dt", rank, inner, bias=True, parallel=column)
        self.constants = Constants(path, {"a_log": (inner, state), "d": (inner,)}, sizes.convolved, ctx)
        self.out = ctx.linear(f"{path}.out", inner, width, bias=sizes.bias, parallel=row)
        self.norms = nn.ModuleList()
        if sizes.norms:
            with_weight = sizes.norms == "weights"
            for name, size in (("dt", rank), ("b", state), ("c", state)):
                self.norms.append(ctx.norm(f"{path}.{name}_norm", size, sizes.eps, weight=with_weight))
        self.recurrent = ctx.recurrent(index)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return what the layer adds, [T, E]."""
        x_TI, gate_TI = self.inputs(x_TE).chunk(2, -1)
        x_TI = self.recurrent.convolve(x_TI, self.conv, ctx)
        dt_TR, b_TN, c_TN = self.select(x_TI).split(self._split, -1)
        if len(self.norms):
            dt_TR, b_TN, c_TN = (norm(x.contiguous()) for norm, x in zip(self.norms, (dt_TR, b_TN, c_TN), strict=True))
        tokens = {"x": x_TI, "dt": self.dt(dt_TR.contiguous()), "b": b_TN, "c": c_TN}
        y_TI = self.recurrent.mix(tokens, self.constants(), torch.empty_like(x_TI), ctx)
        mixed_TE: torch.Tensor = self.out(y_TI * nn.functional.silu(gate_TI))
        return mixed_TE


class Mamba2Mixer(nn.Module):
    """A state space with one decay for each head, and a gated norm behind it."""

    factors: torch.Tensor | None

    def __init__(
        self, index: int, path: str, width: int, sizes: Mamba2Sizes, group: AttentionGroup, ctx: BuildContext
    ) -> None:
        super().__init__()
        self.head_size, self.state = sizes.head_size, sizes.state
        column, unit = Parallel.COLUMN, sizes.head_size
        self.inputs = ctx.linear(f"{path}.in", width, sizes.inputs, bias=sizes.bias, parallel=column)
        self._split = list(self.inputs.info.local_output_sizes)
        self.conv = convolution(path, sizes.convolved, sizes.width, ctx, bias=sizes.conv_bias)
        shapes = dict.fromkeys(("a_log", "d", "dt_bias"), (sizes.heads,))
        self.constants = Constants(path, shapes, (sizes.steps,), ctx)
        self.norm = None
        if sizes.norm:
            size, first = sizes.norm_size, sizes.gate_first
            self.norm = ctx.gated_norm(f"{path}.norm", sizes.values, sizes.eps, size=size, gate_first=first)
        bias = sizes.bias if sizes.out_bias is None else sizes.out_bias
        self.out = ctx.linear(f"{path}.out", sizes.inner, width, bias=bias, parallel=Parallel.ROW, input_unit=unit)
        self.recurrent = ctx.recurrent(index)
        factors = _spread(sizes.factors, self._split, ctx) if sizes.factors else None
        self.register_buffer("factors", factors, persistent=False)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return what the layer adds, [T, E]."""
        gate, _, b, _, _ = self._split
        inputs_TO = self.inputs(x_TE)
        if self.factors is not None:
            inputs_TO = inputs_TO * self.factors
        gate_TI, convolved, dt_TH = inputs_TO.split([gate, gate + 2 * b, self._split[-1]], -1)
        x_TI, b_TM, c_TM = self.recurrent.convolve(convolved.contiguous(), self.conv, ctx).split([gate, b, b], -1)
        x_THV = x_TI.unflatten(-1, (-1, self.head_size))
        b_TGN, c_TGN = (value.unflatten(-1, (-1, self.state)) for value in (b_TM, c_TM))
        tokens = {"x": x_THV, "dt": dt_TH, "b": b_TGN, "c": c_TGN}
        y_TI = self.recurrent.mix(tokens, self.constants(), x_THV.new_empty(x_THV.shape), ctx).flatten(1)
        y_TI = y_TI * nn.functional.silu(gate_TI) if self.norm is None else self.norm(y_TI, gate_TI)
        mixed_TE: torch.Tensor = self.out(y_TI)
        return mixed_TE


def _spread(factors: Sequence[float], sizes: Sequence[int], ctx: BuildContext) -> torch.Tensor:
    """Return each factor as often as its size says, [sum of sizes]."""
    found = [torch.full((size,), factor) for factor, size in zip(factors, sizes, strict=True)]
    return torch.cat(found).to(ctx.device, ctx.dtype)
