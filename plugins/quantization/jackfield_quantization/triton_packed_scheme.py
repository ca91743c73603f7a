"""Four-bit numbers as the Triton kernel reads them. Legend: O outputs, I inputs, J groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from jackfield.interfaces import ParameterHolder, QuantizedActivation
from jackfield_quantization.stored import DecodedScheme, Integers, Piece, Storage, decoded, stored_of
from jackfield_quantization.triton_packed import BLOCK
from jackfield_quantization.unquantized_scheme import WEIGHT, DenseScheme

SCALES, ZEROS, ORDER = "weight_scale", "weight_zero", "weight_order"
LARGEST = 15


class TritonPackedScheme(DecodedScheme):
    """Loads what is stored; becomes one packed weight where that is exact, else one dense weight."""

    becomes_dense = False

    def __init__(self, storages: Mapping[str, Storage]) -> None:
        super().__init__(storages)
        self._group = 0
        self._cores = 1
        self._counters: torch.Tensor | None = None
        self._ordered = False

    def finalize(self, layer: ParameterHolder) -> None:
        """Pack the matrices again, stacked along the outputs."""
        made = self._packed(layer)
        if made is None:
            layer.replace_parameters({WEIGHT: decoded(layer, self._storages)})
            return
        layer.replace_parameters(made)
        weight = layer.get_parameter(WEIGHT)
        if weight.device.type == "cuda":
            self._cores = torch.cuda.get_device_properties(weight.device).multi_processor_count
        # Late, so that everything but the kernel works without Triton.
        from jackfield_quantization.triton_packed_launch import counters_needed

        self._counters = torch.zeros(counters_needed(len(weight)), dtype=torch.int32, device=weight.device)

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
            raise TypeError("packed weights take plain activations")
        if self._counters is None:
            return DenseScheme().apply(layer, x_TI, bias_O, out_TO)
        from jackfield_quantization.triton_packed_launch import Packed, packed_product

        numbers, scales, zeros = (layer.get_parameter(name) for name in (WEIGHT, SCALES, ZEROS))
        weight = Packed(numbers, scales, zeros, self._group)
        flat = x_TI.reshape(-1, x_TI.shape[-1])
        if self._ordered:
            flat = flat.index_select(1, layer.get_parameter(ORDER))
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        made = flat.new_empty((len(flat), len(weight.numbers))) if out_TO is None else out_TO
        if len(flat):
            packed_product(flat, weight, bias_O, made, self._cores, self._counters)
        return made.view(*x_TI.shape[:-1], -1) if out_TO is None else made

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the weight [O, I] in the computation type."""
        if self._counters is None:
            return super().dequantize(layer)
        scales, zeros = (layer.get_parameter(name).float() for name in (SCALES, ZEROS))
        groups = torch.arange(layer.info.local_input_size, device=scales.device) // self._group
        wide = (unpacked(layer.get_parameter(WEIGHT)).float() - zeros[:, groups]) * scales[:, groups]
        if self._ordered:
            wide = wide[:, torch.argsort(layer.get_parameter(ORDER))]
        return wide.to(getattr(torch, layer.info.dtype))

    def _packed(self, layer: ParameterHolder) -> dict[str, torch.Tensor] | None:
        """Return the parameters of a packed weight, or None where the layer cannot be one."""
        parts, orders, groups = [], [], set()
        for shard in layer.info.shards:
            piece, storage = Piece(layer.info, shard), self._storages[shard.name]
            matrix = storage.integers(piece, stored_of(layer, piece, storage))
            found = None if matrix is None else in_order(matrix)
            made = None if found is None else as_bytes(*found[:3])
            if found is None or made is None:
                return None
            parts.append(made)
            groups.add(found[2])
            orders.append(found[3])
        if len(groups) != 1 or any(not torch.equal(order, orders[0]) for order in orders):
            return None
        self._group = groups.pop()
        plain = torch.arange(len(orders[0]), device=orders[0].device)
        self._ordered = not torch.equal(orders[0], plain)
        named = {name: torch.cat([part[i] for part in parts]) for i, name in enumerate((WEIGHT, SCALES, ZEROS))}
        return {**named, ORDER: orders[0]} if self._ordered else named


def in_order(matrix: Integers) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor] | None:
    """Return numbers [O, I] with the inputs of a group beside one another, scales [O, J], the size of a group and the
    order of inputs; None where groups differ in size.
    """
    counts = torch.bincount(matrix.groups, minlength=matrix.scales.shape[1])
    counts = counts[counts > 0]
    size = int(counts[0])
    if bool((counts != size).any()) or size * len(counts) != matrix.values.shape[1]:
        return None
    order = torch.argsort(matrix.groups, stable=True)
    present = matrix.groups[order][::size]
    return matrix.values[:, order], matrix.scales[:, present], size, order


def as_bytes(
    values_OI: torch.Tensor, scales_OJ: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return (bytes [O, I / 2], scales [O, J], zero points [O, J]) as the kernel reads them, or None where numbers of a
    group span more than four bits or columns fill no block.
    """
    outputs, inputs = values_OI.shape
    if inputs % BLOCK or group % (BLOCK // 8):
        return None
    grouped = torch.unflatten(values_OI.int(), 1, (-1, group))
    least = grouped.amin(-1).clamp(max=0)
    numbers = grouped - least.unsqueeze(-1)
    if int(numbers.max()) > LARGEST or int(least.min()) < -255:
        return None
    blocks = numbers.flatten(1).to(torch.uint8).view(outputs, -1, 2, BLOCK // 2)
    packed = (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1).contiguous()
    half = scales_OJ.half()
    scales = half if torch.equal(half.float(), scales_OJ.float()) else scales_OJ.float()
    return packed, scales.contiguous(), (-least).to(torch.uint8).contiguous()


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers [O, I] of bytes."""
    halves = torch.unflatten(packed, 1, (-1, BLOCK // 2))
    return torch.stack((halves & LARGEST, halves >> 4), 2).flatten(1)
