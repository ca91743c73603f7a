"""A gated delta network in torch. Legend: T tokens, E width, G key heads, K key size, H value heads, V value size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, Parallel
from jackfield_models.delta_parts import DeltaSizes
from jackfield_models.mamba_mixers import Constants, convolution


class DeltaMixer(nn.Module):
    """Queries, keys and values through a short convolution, the gated delta rule, and a norm beside a gate."""

    def __init__(
        self, index: int, path: str, width: int, sizes: DeltaSizes, group: AttentionGroup, ctx: BuildContext
    ) -> None:
        super().__init__()
        self._reach = sizes.reach
        self._key, self._value, column = sizes.key, sizes.value, Parallel.COLUMN
        self.inputs = ctx.linear(f"{path}.in", width, sizes.inputs, parallel=column)
        self.rates = ctx.linear(f"{path}.rates", width, sizes.rates, parallel=column)
        q, k, v, z = self.inputs.info.local_output_sizes
        self._outer, self._inner = [q + k + v, z], [q, k, v]
        self.conv = convolution(path, sizes.convolved, sizes.width, ctx, bias=False)
        shapes = dict.fromkeys(("a_log", "dt_bias"), (sizes.heads,))
        self.constants = Constants(path, shapes, (sizes.rates[0],), ctx)
        self.norm = ctx.gated_norm(
            f"{path}.norm", sizes.values, sizes.eps, size=sizes.value, gate_first=False, shared=True
        )
        inner = sizes.heads * sizes.value
        self.out = ctx.linear(f"{path}.out", inner, width, parallel=Parallel.ROW, input_unit=sizes.value)
        self.recurrent = ctx.recurrent(index)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return what the layer adds, [T, E]."""
        convolved, z_TI = self.inputs(x_TE).split(self._outer, -1)
        q, k, v = self.recurrent.convolve(convolved.contiguous(), self.conv, ctx).split(self._inner, -1)
        q_TGK, k_TGK = (part.unflatten(-1, (-1, self._key)) for part in (q, k))
        v_THV = v.unflatten(-1, (-1, self._value))
        b_TH, a_TH = self.rates(x_TE).chunk(2, -1)
        constants = self.constants()
        g_TH = constants["a"] * F.softplus(a_TH.float() + constants["dt_bias"])
        tokens = {"q": q_TGK, "k": k_TGK, "v": v_THV, "g": g_TH, "beta": b_TH.float().sigmoid() * self._reach}
        y_THV = self.recurrent.mix(tokens, {}, v_THV.new_empty(v_THV.shape), ctx)
        mixed_TE: torch.Tensor = self.out(self.norm(y_THV.flatten(1), z_TI))
        return mixed_TE
