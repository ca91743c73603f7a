"""Kimi Delta Attention in torch. Legend: T tokens, E width, H heads, K size of a head, I features of all heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield_models.kda_parts import KdaSizes
from jackfield_models.mamba_mixers import convolution


class KimiMixer(nn.Module):
    """Queries, keys and values through a short convolution, the delta rule with a decay for each feature, and a norm
    beside a gate.
    """

    def __init__(
        self, index: int, path: str, width: int, sizes: KdaSizes, group: AttentionGroup, ctx: BuildContext
    ) -> None:
        super().__init__()
        column, inner, heads = Parallel.COLUMN, sizes.values.size, OutputShard("", sizes.heads)
        self._size, self._bound = sizes.size, sizes.bound
        self.inputs = ctx.linear(f"{path}.in", width, sizes.convolved, parallel=column)
        self.rates = ctx.linear(f"{path}.rates", width, [heads], parallel=column)
        self._heads = heads.slice(self.rates.info.rank)
        self.conv = convolution(path, sizes.convolved, sizes.width, ctx, bias=False)
        self.narrow = None
        if sizes.low_rank:
            self.narrow = ctx.linear(f"{path}.narrow", width, [OutputShard(name, sizes.size) for name in "fg"])
        shard = OutputShard("", inner, sizes.size)
        taken = sizes.size if sizes.low_rank else width
        self.decay = ctx.linear(f"{path}.decay", taken, [shard], parallel=column)
        self.gate = ctx.linear(f"{path}.gate", taken, [shard], parallel=column)
        wide = torch.float32
        self.a_log = ctx.parameters(f"{path}.a_log", {"weight": sizes.log_shape or (sizes.heads,)}, dtype=wide)
        self.dt_bias = ctx.parameters(f"{path}.dt_bias", {"weight": (inner,)}, shards=[shard], dtype=wide)
        self.norm = ctx.gated_norm(
            f"{path}.norm",
            sizes.values,
            sizes.eps,
            size=sizes.size,
            activation="sigmoid",
            gate_first=False,
            shared=True,
        )
        self.out = ctx.linear(f"{path}.out", inner, width, parallel=Parallel.ROW, input_unit=sizes.size)
        self.recurrent = ctx.recurrent(index)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return what the layer adds, [T, E]."""
        qkv = self.recurrent.convolve(self.inputs(x_TE), self.conv, ctx)
        q_THK, k_THK, v_THK = (part.unflatten(-1, (-1, self._size)) for part in qkv.chunk(3, -1))
        narrow = (x_TE, x_TE) if self.narrow is None else (x.contiguous() for x in self.narrow(x_TE).chunk(2, -1))
        decay_TI, gate_TI = (layer(x) for layer, x in zip((self.decay, self.gate), narrow, strict=True))
        beta_TH = self.rates(x_TE).float().sigmoid()
        tokens = {"q": q_THK, "k": k_THK, "v": v_THK, "g": self._decays(decay_TI), "beta": beta_TH}
        y_THK = self.recurrent.mix(tokens, {}, v_THK.new_empty(v_THK.shape), ctx)
        mixed_TE: torch.Tensor = self.out(self.norm(y_THK.flatten(1), gate_TI))
        return mixed_TE

    def _decays(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return logarithms of decays [T, H, K]."""
        x_THK = torch.unflatten(x_TI.float() + self.dt_bias.weight, -1, (-1, self._size))
        rate_H1: torch.Tensor = self.a_log.weight.flatten()[slice(*self._heads)].exp().unsqueeze(-1)
        if self._bound is None:
            return -rate_H1 * F.softplus(x_THK)
        return self._bound * torch.sigmoid(rate_H1 * x_THK)
