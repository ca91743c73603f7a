"""A gated short convolution in torch. Legend: T tokens, E width, C channels, W width of the convolution."""

from __future__ import annotations

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, Parallel
from jackfield_models.mamba_mixers import convolution
from jackfield_models.short_conv_parts import ShortConvSizes


class ShortConvMixer(nn.Module):
    """Projects to two gates and an input, and convolves between the gates."""

    def __init__(
        self, index: int, path: str, width: int, sizes: ShortConvSizes, group: AttentionGroup, ctx: BuildContext
    ) -> None:
        super().__init__()
        self.inputs = ctx.linear(f"{path}.in", width, sizes.inputs, bias=sizes.bias, parallel=Parallel.COLUMN)
        self.conv = convolution(path, sizes.convolved, sizes.width, ctx, bias=sizes.bias)
        self.out = ctx.linear(f"{path}.out", sizes.channels, width, bias=sizes.bias, parallel=Parallel.ROW)
        self.recurrent = ctx.recurrent(index)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return what the layer adds, [T, E]."""
        before_TC, behind_TC, x_TC = self.inputs(x_TE).chunk(3, -1)
        constants = {"weight": self.conv.get_parameter("weight").squeeze(1)}
        if self.conv._parameters.get("bias") is not None:
            constants["bias"] = self.conv.get_parameter("bias")
        tokens = {"x": before_TC * x_TC}
        y_TC = self.recurrent.mix(tokens, constants, torch.empty_like(tokens["x"]), ctx)
        mixed_TE: torch.Tensor = self.out(behind_TC * y_TC)
        return mixed_TE
