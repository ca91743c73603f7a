"""The work, in torch. T rows, I inputs, O outputs."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from jackfield.interfaces import LayerInfo, LinearScheme, ParameterHolder, ParameterSpec, QuantizedActivation


class Int8Scheme(LinearScheme):
    """``weight`` int8 [O, I] times ``scale`` float32 [O]."""

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        outputs = sum(info.local_output_sizes)
        return [
            ParameterSpec("weight", "weight", (outputs, info.local_input_size), "int8"),
            ParameterSpec("scale", "scale", (outputs,), "float32", output_dim=0, input_dim=None),
        ]

    def apply(
        self,
        layer: ParameterHolder,
        x_TI: torch.Tensor | QuantizedActivation,
        bias_O: torch.Tensor | None,
        out_TO: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(x_TI, QuantizedActivation):
            raise TypeError("rows come as they are: activation_spec asks for nothing else")
        found = F.linear(x_TI, self.dequantize(layer), bias_O)
        return found if out_TO is None else out_TO.copy_(found)

    def lookup(self, layer: ParameterHolder, ids_T: torch.Tensor) -> torch.Tensor:
        return self.dequantize(layer)[ids_T]

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        wide = layer.get_parameter("weight").float() * layer.get_parameter("scale").unsqueeze(1)
        dtype: torch.dtype = getattr(torch, layer.info.dtype)
        return wide.to(dtype)
