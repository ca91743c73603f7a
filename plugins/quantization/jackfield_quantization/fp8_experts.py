"""Dense experts that become float8_e4m3fn with a float32 scale for each output.

Legend: X experts, O outputs, I inputs.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from jackfield.interfaces import ParameterHolder
from jackfield.layers.functional import quantize_rows
from jackfield_quantization.unquantized_scheme import WEIGHT, DenseScheme

SCALE = "weight_scale"


class Fp8ExpertScheme(DenseScheme):
    """Loads as dense experts do; ends in the layout ``fp8`` with scales [X, O, 1]."""

    layout: ClassVar[str] = "fp8"

    def finalize(self, layer: ParameterHolder) -> None:
        """Convert expert by expert, so that no second copy of all of them is in memory."""
        wide_XOI = layer.get_parameter(WEIGHT)
        narrow_XOI = torch.empty(wide_XOI.shape, dtype=torch.float8_e4m3fn, device=wide_XOI.device)
        scale_XO1 = torch.empty((*wide_XOI.shape[:2], 1), dtype=torch.float32, device=wide_XOI.device)
        for expert, wide_OI in enumerate(wide_XOI):
            made = quantize_rows(wide_OI)
            narrow_XOI[expert], scale_XO1[expert, :, 0] = made.values, made.scales
        layer.replace_parameters({WEIGHT: narrow_XOI, SCALE: scale_XO1})

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the experts [X, O, I] in float32."""
        return layer.get_parameter(WEIGHT).float() * layer.get_parameter(SCALE)
