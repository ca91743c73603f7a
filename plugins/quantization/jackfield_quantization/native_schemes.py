"""Weights of a layer as the kernels in C read them.

Legend: T rows of activations, I inputs, O outputs, B bytes or numbers of a stored row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from jackfield.interfaces import LayerInfo, LinearScheme, ParameterHolder, ParameterSpec, QuantizedActivation
from jackfield_native.products import Part, Weight, decode_rows
from jackfield_quantization.gguf_scheme import GgufScheme, parameter_name, storage_type
from jackfield_quantization.unquantized_scheme import WEIGHT, DenseScheme

MOST_DENSE_ROWS = 24
"""Up to this many rows the kernels are ahead of torch's product (benchmarks/cpu_kernels.py)."""
MOST_ROWS = 96
"""The same where torch's product must wait for the weight to be decoded or widened first."""
NEAR_NUMBERS = 1 << 18
"""Numbers of the activations that stay in a core's cache; with more the kernels are no longer ahead."""
NARROW = {"bfloat16": "BF16", "float16": "F16"}
"""Types that widen to float32 exactly, and the kernels' words for them."""
WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class NativeScheme(LinearScheme):
    """Products with the stored weight of one layer; every layer has a scheme of its own.

    Args:
        integers: see :class:`Weight`.
    """

    def __init__(self, integers: bool = False) -> None:
        self._weight: Weight | None = None
        self._few = 0
        self._integers = integers

    def weight(self, layer: ParameterHolder) -> Weight:
        """Return the layer's weight, ready for products."""
        if self._weight is None:
            # A row that must be what it is among many stays in float32, as these do.
            integers = self._integers and not layer.info.batch_invariant
            self._weight = Weight(self.parts(layer), layer.info.local_input_size, integers=integers)
            self._few = most_rows(self._weight.inputs)
        return self._weight

    def parts(self, layer: ParameterHolder) -> Sequence[Part]:
        """Return the stored parts of the weight in order."""
        raise NotImplementedError

    def apply(
        self,
        layer: ParameterHolder,
        x_TI: torch.Tensor | QuantizedActivation,
        bias_O: torch.Tensor | None,
        out_TO: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``x @ W.T + bias``, in ``out`` when given; raises TypeError for quantized activations, which these
        schemes never ask for.
        """
        weight = self._weight or self.weight(layer)
        if isinstance(x_TI, QuantizedActivation):
            raise TypeError("native products take plain activations")
        if x_TI.dim() != 2 or x_TI.stride(1) != 1:
            flat_TI = x_TI.reshape(-1, x_TI.shape[-1]).contiguous()
            made = self.apply(layer, flat_TI, bias_O).view(*x_TI.shape[:-1], weight.outputs)
        elif out_TO is None or out_TO.stride(1) != 1:
            made = torch.empty((x_TI.shape[0], weight.outputs), dtype=x_TI.dtype)
            self.multiply(layer, weight, x_TI, bias_O, made)
        else:
            return self.multiply(layer, weight, x_TI, bias_O, out_TO)
        return made if out_TO is None else out_TO.copy_(made)

    def multiply(
        self,
        layer: ParameterHolder,
        weight: Weight,
        x_TI: torch.Tensor,
        bias_O: torch.Tensor | None,
        out_TO: torch.Tensor,
    ) -> torch.Tensor:
        """Write ``x @ W.T + bias`` into ``out`` and return it; all are contiguous inside a row."""
        if x_TI.shape[0] > self._few and not layer.info.batch_invariant:
            return weight.many_rows(x_TI, bias_O, out_TO)
        if x_TI.dtype == torch.float32 == out_TO.dtype:
            return weight.few_rows(x_TI, bias_O, out_TO)
        return few_narrow_rows(weight, x_TI, bias_O, out_TO)

    def lookup(self, layer: ParameterHolder, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the rows ``W[ids]`` [T, I], of which alone numbers are made."""
        ((weight_OB, word),) = self.parts(layer)
        rows = decode_rows(weight_OB.index_select(0, ids_T), word, layer.info.local_input_size)
        return rows.to(_dtype(layer.info))

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the weight [O, I] in the computation type."""
        return self.weight(layer).decode(_dtype(layer.info))


class NativeDenseScheme(NativeScheme):
    """One parameter ``weight`` [O, I], in the computation type or a narrower one that the checkpoint has."""

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return the one weight."""
        (spec,) = DenseScheme().parameters(info)
        return (replace(spec, dtype=stored_type(info)),)

    def parts(self, layer: ParameterHolder) -> Sequence[Part]:
        """See NativeScheme."""
        weight_OI = layer.get_parameter(WEIGHT)
        return ((weight_OI, WORDS[weight_OI.dtype]),)

    def multiply(
        self,
        layer: ParameterHolder,
        weight: Weight,
        x_TI: torch.Tensor,
        bias_O: torch.Tensor | None,
        out_TO: torch.Tensor,
    ) -> torch.Tensor:
        """See NativeScheme. More than a few rows in the weight's own type are torch's alone."""
        if x_TI.shape[0] > MOST_DENSE_ROWS and not layer.info.batch_invariant:
            weight_OI = weight.parts[0][0]
            if weight_OI.dtype == x_TI.dtype == out_TO.dtype:
                return DenseScheme().apply(layer, x_TI, bias_O, out_TO)
        return super().multiply(layer, weight, x_TI, bias_O, out_TO)

    def lookup(self, layer: ParameterHolder, ids_T: torch.Tensor) -> torch.Tensor:
        """See NativeScheme."""
        return F.embedding(ids_T, layer.get_parameter(WEIGHT)).to(_dtype(layer.info))

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the weight in the computation type; not a copy where it is stored so."""
        return layer.get_parameter(WEIGHT).to(_dtype(layer.info))


class PackedScheme(NativeScheme):
    """GGUF weights as stored. Neighbouring shards of one type are stacked into one parameter."""

    def __init__(self, integers: bool = False) -> None:
        super().__init__(integers)
        self._words: tuple[str, ...] = ()

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return one parameter for each shard; see :class:`GgufScheme`."""
        return GgufScheme().parameters(info)

    def finalize(self, layer: ParameterHolder) -> None:
        """Stack what can be stacked."""
        runs = list(_runs(layer))
        self._words = tuple(word for _, word in runs)
        layer.replace_parameters({f"{WEIGHT}_{i}": stacked for i, (stacked, _) in enumerate(runs)})

    def parts(self, layer: ParameterHolder) -> Sequence[Part]:
        """See NativeScheme."""
        return [(layer.get_parameter(f"{WEIGHT}_{i}"), word) for i, word in enumerate(self._words)]


class DequantizedScheme(NativeDenseScheme):
    """GGUF weights of types that the kernels do not read: dense after loading, as ``gguf`` makes them."""

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """See :class:`GgufScheme`."""
        return GgufScheme().parameters(info)

    def finalize(self, layer: ParameterHolder) -> None:
        """See :class:`GgufScheme`."""
        GgufScheme().finalize(layer)


def most_rows(inputs: int) -> int:
    """Return up to how many rows the kernels multiply with stored weights."""
    return min(MOST_ROWS, max(MOST_DENSE_ROWS, NEAR_NUMBERS // max(1, inputs)))


def few_narrow_rows(
    weight: Weight, x_TI: torch.Tensor, bias_O: torch.Tensor | None, out_TO: torch.Tensor
) -> torch.Tensor:
    """Write the product into ``out`` and return it; rounded once, from sums in float32."""
    sums_TO = torch.empty(out_TO.shape, dtype=torch.float32)
    return out_TO.copy_(weight.few_rows(x_TI.float(), None if bias_O is None else bias_O.float(), sums_TO))


def stored_type(info: LayerInfo) -> str:
    """Return the type that all shards have in the checkpoint if float32 holds it exactly, else the computation's."""
    found = {info.tensors[s.name][WEIGHT].dtype if WEIGHT in info.tensors.get(s.name, {}) else "" for s in info.shards}
    word = found.pop() if len(found) == 1 else ""
    return word if info.dtype == "float32" and word in NARROW else info.dtype


def _runs(layer: ParameterHolder) -> Iterator[Part]:
    info = layer.info
    waiting: list[torch.Tensor] = []
    for index, shard in enumerate(info.shards):
        word = storage_type(info, shard)
        waiting.append(layer.get_parameter(parameter_name(shard)).detach())
        last = index + 1 == len(info.shards)
        if last or storage_type(info, info.shards[index + 1]) != word:
            yield (waiting[0] if len(waiting) == 1 else torch.cat(waiting)), word
            waiting = []


def _dtype(info: LayerInfo) -> torch.dtype:
    found: torch.dtype = getattr(torch, info.dtype)
    return found
