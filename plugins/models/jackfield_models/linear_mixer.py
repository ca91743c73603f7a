"""Lightning attention in torch. Legend: T tokens, E width, H heads, K size of a head, I features of all heads."""

from __future__ import annotations

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield_models.linear_parts import LinearSizes


class LinearMixer(nn.Module):
    """Activated queries, keys and values, linear attention with fixed decays, and a norm beside a gate."""

    decays: torch.Tensor

    def __init__(
        self, index: int, path: str, width: int, sizes: LinearSizes, group: AttentionGroup, ctx: BuildContext
    ) -> None:
        super().__init__()
        inner, column = sizes.heads * sizes.size, Parallel.COLUMN
        self._size = sizes.size
        values = OutputShard("", inner, sizes.size)
        self.inputs = ctx.linear(f"{path}.in", width, sizes.inputs, parallel=column)
        self.activation = ctx.activation(sizes.activation, gated=False)
        self.gate = ctx.linear(f"{path}.gate", width, [values], parallel=column)
        self.norm = ctx.gated_norm(f"{path}.norm", values, sizes.eps, activation="sigmoid", gate_first=False)
        self.out = ctx.linear(f"{path}.out", inner, width, parallel=Parallel.ROW, input_unit=sizes.size)
        mine = slice(*OutputShard("", sizes.heads).slice(self.inputs.info.rank))
        decays_H = torch.tensor(sizes.decays(index)[mine], dtype=torch.float32, device=ctx.device)
        self.register_buffer("decays", decays_H, persistent=False)
        self.recurrent = ctx.recurrent(index)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return what the layer adds, [T, E]."""
        parts = self.activation(self.inputs(x_TE)).chunk(3, -1)
        q_THK, k_THK, v_THK = (part.unflatten(-1, (-1, self._size)) for part in parts)
        tokens = {"q": q_THK, "k": k_THK, "v": v_THK}
        y_THK = self.recurrent.mix(tokens, {"g": self.decays}, v_THK.new_empty(v_THK.shape), ctx)
        mixed_TE: torch.Tensor = self.out(self.norm(y_THK.flatten(1), self.gate(x_TE)))
        return mixed_TE
