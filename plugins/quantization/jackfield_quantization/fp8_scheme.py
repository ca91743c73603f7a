"""A dense weight that becomes float8_e4m3fn with a float32 scale for each output.

Few rows of activations are multiplied as they are (the weight is expanded in registers): one, and up to ``NARROW_ROWS``
where the weight is short. More are quantized row by row first, so that matrix units take 8-bit floats on both sides.
Legend: T rows of activations, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from jackfield.interfaces import ActivationSpec, LayerInfo, ParameterHolder, PendingNorm, QuantizedActivation
from jackfield.layers.functional import quantize_rows
from jackfield_quantization.triton_dense_plan import (
    GATES,
    NOTHING,
    SkinnyShape,
    counters_for,
    foldable_ops,
    narrow_shape,
)
from jackfield_quantization.unquantized_scheme import WEIGHT, DenseScheme
from jackfield_triton.launch import pdl_of

SCALE = "weight_scale"


class Fp8Scheme(DenseScheme):
    """Loads as a dense weight does. One object serves one layer, whose products must follow one another."""

    def __init__(self) -> None:
        self._cores = 0
        self._pdl = False
        self._counters: torch.Tensor | None = None
        self._one: torch.Tensor | None = None

    def activation_spec(self, info: LayerInfo, rows: int) -> ActivationSpec | None:
        """Return what quantized input the layer takes: none where activations are multiplied as they are."""
        # One row is always multiplied as it is: it is read no faster when it is narrow.
        if self._counters is None or rows <= 1 or info.dtype == "float32" or self._shape_of(info, rows) is not None:
            return None
        return ActivationSpec("float8_e4m3fn", "token")

    def folded_ops(self, info: LayerInfo, rows: int) -> frozenset[str]:
        """See LinearScheme: those of rows that are multiplied as they are."""
        if self._counters is None or info.dtype == "float32":
            return NOTHING
        return foldable_ops(rows, self._shape_of(info, rows))

    def _shape_of(self, info: LayerInfo, rows: int) -> SkinnyShape | None:
        return narrow_shape(rows, sum(info.local_output_sizes), info.local_input_size, self._cores)

    def finalize(self, layer: ParameterHolder) -> None:
        """Convert the weight."""
        narrow = quantize_rows(layer.get_parameter(WEIGHT))
        self.hold(layer, narrow.values, narrow.scales)

    def hold(self, layer: ParameterHolder, weight: torch.Tensor, scale_O: torch.Tensor) -> None:
        """Give the layer its final parameters, and prepare products with them."""
        layer.replace_parameters({WEIGHT: weight, SCALE: scale_O})
        if weight.device.type == "cuda":
            self._cores = torch.cuda.get_device_properties(weight.device).multi_processor_count
            self._pdl = pdl_of(torch.cuda.get_device_capability(weight.device), True)
            outputs, inputs = weight.shape
            needed = counters_for(outputs, inputs, self._cores)
            self._one = torch.ones((), device=weight.device)
            self._counters = torch.zeros(max(1, needed), dtype=torch.int32, device=weight.device)

    def apply(
        self,
        layer: ParameterHolder,
        x_TI: torch.Tensor | QuantizedActivation,
        bias_O: torch.Tensor | None,
        out_TO: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``x @ W.T + bias``, in ``out`` when given."""
        if isinstance(x_TI, QuantizedActivation):
            return _stored(self._both(layer, x_TI, bias_O), out_TO)
        if self._counters is None or x_TI.dtype == torch.float32:
            return _stored(F.linear(x_TI, self.dequantize_as(layer, x_TI.dtype), bias_O), out_TO)
        found = self._as_they_are(layer, x_TI, bias_O, out_TO)
        if found is not None:
            return found
        from jackfield_quantization.fp8_kernels import quantize_tokens

        return _stored(self._both(layer, quantize_tokens(x_TI), bias_O, x_TI.dtype), out_TO)

    def apply_folded(
        self, layer: ParameterHolder, x_TI: torch.Tensor | PendingNorm, bias_O: torch.Tensor | None, gate: str = ""
    ) -> torch.Tensor:
        """See LinearScheme."""
        found = self._as_they_are(layer, x_TI, bias_O, None, GATES[gate] if gate else "")
        assert found is not None, "asked for what folded_ops names"
        return found

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the weight [O, I] in the computation type."""
        return self.dequantize_as(layer, getattr(torch, layer.info.dtype))

    def dequantize_as(self, layer: ParameterHolder, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [O, I] in ``dtype``."""
        wide = layer.get_parameter(WEIGHT).float() * layer.get_parameter(SCALE).unsqueeze(-1)
        return wide.to(dtype)

    def _as_they_are(
        self,
        layer: ParameterHolder,
        given: torch.Tensor | PendingNorm,
        bias_O: torch.Tensor | None,
        out_TO: torch.Tensor | None,
        gate: str = "",
    ) -> torch.Tensor | None:
        """Return the product of rows that are not quantized, or None where there is no launch for it."""
        weight_OI = layer.get_parameter(WEIGHT)
        outputs, inputs = weight_OI.shape
        x_TI = given.x if isinstance(given, PendingNorm) else given
        shape = narrow_shape(len(x_TI), outputs, inputs, self._cores)
        if shape is None or self._counters is None or x_TI.stride(-1) != 1:
            return None
        from jackfield_quantization.triton_dense_launch import skinny_product

        out = x_TI.new_empty((len(x_TI), outputs // 2 if gate else outputs)) if out_TO is None else out_TO
        scale = layer.get_parameter(SCALE)
        return skinny_product(given, weight_OI, bias_O, out, shape, self._counters, self._pdl, scale, gate)

    def _both(
        self,
        layer: ParameterHolder,
        x: QuantizedActivation,
        bias_O: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the product of quantized rows."""
        weight_OI, scale_O = layer.get_parameter(WEIGHT), layer.get_parameter(SCALE)
        kind: torch.dtype = dtype or getattr(torch, layer.info.dtype)
        if weight_OI.device.type != "cuda":
            rows = x.values.float() * x.scales.unsqueeze(-1)
            return F.linear(rows.to(kind), self.dequantize_as(layer, kind), bias_O)
        if scaled_behind(len(x.values), weight_OI.shape[0], weight_OI.shape[1]):
            return self._scaled_behind(x, weight_OI, scale_O, bias_O).to(kind)
        # Scales row by row are there for results in bfloat16 alone.
        out = torch._scaled_mm(
            x.values,
            weight_OI.t(),
            scale_a=x.scales.unsqueeze(-1),
            scale_b=scale_O.unsqueeze(0),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        out = out if kind == torch.bfloat16 else out.to(kind)
        return out if bias_O is None else out.add_(bias_O)

    def _scaled_behind(
        self, x: QuantizedActivation, weight_OI: torch.Tensor, scale_O: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the product of the 8-bit numbers, multiplied by the scales afterwards."""
        from jackfield_quantization.fp8_kernels import rescale

        one, columns = self._one, weight_OI.t()
        assert one is not None, "set where the weight is on a CUDA device"
        out = torch._scaled_mm(
            x.values, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return rescale(out, x.scales, scale_O, bias_O)


def scaled_behind(rows: int, outputs: int, inputs: int) -> bool:
    """Return whether a product without scales and a kernel that applies them are faster than one product with both.

    The library splits the inputs of products without scales over programs, those of products with scales it does not.
    Measured on an H200 (``benchmarks/gpu_fp8.py``) for the matrices of an 8B model.
    """
    return rows <= 64 or (rows <= 256 and outputs <= 2 * inputs)


def _stored(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None else out.copy_(result)
