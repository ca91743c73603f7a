"""The dense weight of a layer, multiplied by Triton kernels where there are few rows.

Legend: T rows of activations, I inputs, O outputs.
"""

from __future__ import annotations

import torch

from jackfield.interfaces import LayerInfo, ParameterHolder, PendingNorm, QuantizedActivation
from jackfield_quantization.triton_dense_plan import (
    GATES,
    MOST_ROWS,
    NOTHING,
    SkinnyShape,
    counters_for,
    foldable_ops,
    skinny_shape,
)
from jackfield_quantization.unquantized_scheme import WEIGHT, DenseScheme
from jackfield_triton.launch import pdl_of

TYPES = frozenset({torch.bfloat16, torch.float16})
NAMES = frozenset({"bfloat16", "float16"})


class SkinnyScheme(DenseScheme):
    """:class:`DenseScheme`'s storage. One object serves one layer, whose products must follow one another.

    Args:
        pdl: whether products may start while the kernel before them drains (see ``jackfield_triton.launch``).
    """

    def __init__(self, pdl: bool = True) -> None:
        self._wanted, self._pdl = pdl, False
        self._cores = 0
        self._counters: torch.Tensor | None = None

    def finalize(self, layer: ParameterHolder) -> None:
        """Allocate the arrival counters, where the weight is on a CUDA device. Recorded graphs hold their address."""
        weight_OI = layer.get_parameter(WEIGHT)
        if weight_OI.device.type != "cuda" or self._counters is not None:
            return
        self._cores = torch.cuda.get_device_properties(weight_OI.device).multi_processor_count
        self._pdl = pdl_of(torch.cuda.get_device_capability(weight_OI.device), self._wanted)
        outputs, inputs = weight_OI.shape
        needed = counters_for(outputs, inputs, self._cores)
        self._counters = torch.zeros(max(1, needed), dtype=torch.int32, device=weight_OI.device)

    def folded_ops(self, info: LayerInfo, rows: int) -> frozenset[str]:
        """See LinearScheme."""
        if rows > MOST_ROWS or self._counters is None or info.dtype not in NAMES:
            return NOTHING
        outputs, inputs = sum(info.local_output_sizes), info.local_input_size
        return foldable_ops(rows, skinny_shape(rows, outputs, inputs, self._cores))

    def apply_folded(
        self, layer: ParameterHolder, x_TI: torch.Tensor | PendingNorm, bias_O: torch.Tensor | None, gate: str = ""
    ) -> torch.Tensor:
        """See LinearScheme."""
        from jackfield_quantization.triton_dense_launch import skinny_product

        weight_OI = layer.get_parameter(WEIGHT)
        outputs, inputs = weight_OI.shape
        shape = skinny_shape(len(x_TI), outputs, inputs, self._cores)
        assert shape is not None and self._counters is not None, "asked for what folded_ops names"
        x = x_TI.x if isinstance(x_TI, PendingNorm) else x_TI
        out = x.new_empty((len(x), outputs // 2 if gate else outputs))
        kind = GATES[gate] if gate else ""
        return skinny_product(x_TI, weight_OI, bias_O, out, shape, self._counters, self._pdl, gate=kind)

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
        weight_OI = layer.get_parameter(WEIGHT)
        shape = self._shape(x_TI, weight_OI, out_TO)
        if shape is None or isinstance(x_TI, QuantizedActivation):
            return super().apply(layer, x_TI, bias_O, out_TO)
        # Late, so that everything but the kernels works without Triton.
        from jackfield_quantization.triton_dense_launch import skinny_product

        assert self._counters is not None
        out = x_TI.new_empty((len(x_TI), len(weight_OI))) if out_TO is None else out_TO
        return skinny_product(x_TI, weight_OI, bias_O, out, shape, self._counters, self._pdl)

    def _shape(
        self, x_TI: torch.Tensor | QuantizedActivation, weight_OI: torch.Tensor, out_TO: torch.Tensor | None
    ) -> SkinnyShape | None:
        """Return how to launch, or None where torch's product is taken."""
        if self._counters is None or isinstance(x_TI, QuantizedActivation) or x_TI.dim() != 2 or len(x_TI) > MOST_ROWS:
            return None
        tensors = [x_TI, weight_OI] if out_TO is None else [x_TI, weight_OI, out_TO]
        if any(t.dtype not in TYPES or t.dtype != x_TI.dtype or t.stride(1) != 1 for t in tensors):
            return None
        outputs, inputs = weight_OI.shape
        return skinny_shape(len(x_TI), outputs, inputs, self._cores)
