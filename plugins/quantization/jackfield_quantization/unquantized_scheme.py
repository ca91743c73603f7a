"""The dense weight of a layer. Legend: T rows of activations, I input features, O output features, X experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from jackfield.interfaces import LayerInfo, LinearScheme, ParameterHolder, ParameterSpec, QuantizedActivation

WEIGHT = "weight"


class DenseScheme(LinearScheme):
    """One parameter ``weight``, [O, I] or [X, O, I], with all shards stacked along O."""

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return the one weight, in the computation type."""
        shape = weight_shape(info, sum(info.local_output_sizes), info.local_input_size)
        output_dim, input_dim = matrix_dims(info)
        return (ParameterSpec(WEIGHT, WEIGHT, shape, info.dtype, output_dim=output_dim, input_dim=input_dim),)

    def apply(
        self,
        layer: ParameterHolder,
        x_TI: torch.Tensor | QuantizedActivation,
        bias_O: torch.Tensor | None,
        out_TO: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``x @ W.T + bias``, in ``out`` when given; raises TypeError for quantized activations, which this
        scheme never asks for.
        """
        if isinstance(x_TI, QuantizedActivation):
            raise TypeError("a dense weight takes plain activations")
        weight_OI = layer.get_parameter(WEIGHT)
        if out_TO is None:
            return F.linear(x_TI, weight_OI, bias_O)
        if bias_O is None:
            return torch.mm(x_TI, weight_OI.t(), out=out_TO)
        return torch.addmm(bias_O, x_TI, weight_OI.t(), out=out_TO)

    def lookup(self, layer: ParameterHolder, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the rows ``W[ids]``, [T, I]."""
        return F.embedding(ids_T, layer.get_parameter(WEIGHT))

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the weight itself; not a copy."""
        return layer.get_parameter(WEIGHT)


def weight_shape(info: LayerInfo, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of ``rows`` by ``columns`` stored elements, with the experts in front where there are some."""
    return (info.num_experts, rows, columns) if info.num_experts else (rows, columns)


def matrix_dims(info: LayerInfo) -> tuple[int, int]:
    """Return which dimensions run along O and I."""
    return (1, 2) if info.num_experts else (0, 1)
