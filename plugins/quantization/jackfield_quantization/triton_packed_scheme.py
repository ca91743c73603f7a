"""Four-bit numbers as the Triton kernel reads them. Legend: O outputs, I inputs, J groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from jackfield.interfaces import ParameterHolder, QuantizedActivation
from jackfield_quantization.stored import DecodedScheme, Integers, Piece, Storage, decoded, stored_of
from jackfield_quantization.triton_packed import BLOCKS, PLANES
from jackfield_quantization.unquantized_scheme import WEIGHT, DenseScheme
from jackfield_triton.launch import has_gluon, pdl_of

CODES, ORDER = "weight_scale_zero", "weight_order"
LARGEST, ZERO_BITS = 15, 255
MOST_ZERO = 128
"""Greatest zero point that the kernel can subtract: 128 + 128 is the last sum that bfloat16 holds exactly."""


class TritonPackedScheme(DecodedScheme):
    """Loads what is stored; becomes one packed weight where that is exact, else one dense weight."""

    becomes_dense = False

    def __init__(self, storages: Mapping[str, Storage]) -> None:
        super().__init__(storages)
        self._group = 0
        self._cores = 1
        self._pdl = self._tma = self._sliced = False
        self._counters: torch.Tensor | None = None
        self._ordered = False

    def finalize(self, layer: ParameterHolder) -> None:
        """Pack the matrices again, stacked along the outputs."""
        made = self._packed(layer)
        if made is None:
            layer.replace_parameters({WEIGHT: decoded(layer, self._storages)})
            return
        layer.replace_parameters(made)
        # Late, so that everything but the kernel works without Triton.
        from jackfield_quantization.triton_packed_launch import counters_needed, has_copy_engine

        weight = layer.get_parameter(WEIGHT)
        if weight.device.type == "cuda":
            self._cores = torch.cuda.get_device_properties(weight.device).multi_processor_count
            capability = torch.cuda.get_device_capability(weight.device)
            self._pdl, self._tma = pdl_of(capability), has_copy_engine(capability)
            self._sliced = has_gluon()
        self._counters = torch.zeros(counters_needed(weight.shape[1]), dtype=torch.int32, device=weight.device)

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
        from jackfield_quantization.triton_packed_launch import Packed, packed_product, packed_shape

        numbers, codes = layer.get_parameter(WEIGHT), layer.get_parameter(CODES)
        weight = Packed(numbers, codes, self._group)
        flat = x_TI.reshape(-1, x_TI.shape[-1])
        if self._ordered:
            flat = flat.index_select(1, layer.get_parameter(ORDER))
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        made = flat.new_empty((len(flat), numbers.shape[1])) if out_TO is None else out_TO
        if len(flat):
            # The copy engine wants rows of whole 16 bytes.
            tma = self._tma and flat.stride(0) % 8 == 0 and flat.data_ptr() % 16 == 0
            sliced = self._sliced and weight.block == BLOCKS[0]
            shape = packed_shape(len(flat), numbers.shape[1], self._cores, tma, sliced)
            packed_product(flat, weight, bias_O, made, shape, self._counters, self._pdl)
        return made.view(*x_TI.shape[:-1], -1) if out_TO is None else made

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the weight [O, I] in the computation type."""
        if self._counters is None:
            return super().dequantize(layer)
        scales, zeros = (found.t() for found in decoded_codes(layer.get_parameter(CODES)))
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
            made = None if found is None else as_words(*found[:3])
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
        named = {name: torch.cat([part[i] for part in parts], 1) for i, name in enumerate((WEIGHT, CODES))}
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


def as_words(values_OI: torch.Tensor, scales_OJ: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (words [I / block, O, block / 4], codes [J, O]) as the kernel reads them, or None where numbers of a group
    span more than four bits, no block fits the groups, or a scale has more bits than float16 or bfloat16 have.
    """
    outputs, inputs = values_OI.shape
    block = block_of(inputs, group)
    if not block:
        return None
    grouped = torch.unflatten(values_OI.int(), 1, (-1, group))
    least = grouped.amin(-1).clamp(max=0)
    numbers = grouped - least.unsqueeze(-1)
    if int(numbers.max()) > LARGEST or int(least.min()) < -MOST_ZERO:
        return None
    planes = numbers.flatten(1).view(outputs, -1, PLANES, block // PLANES)
    words = sum(planes[:, :, plane] << 4 * plane for plane in range(PLANES))
    assert isinstance(words, torch.Tensor)
    scales = scales_OJ.float().contiguous().view(torch.int32)
    if bool((scales & ZERO_BITS).any()):
        return None
    return words.to(torch.int16).transpose(0, 1).contiguous(), (scales - least).t().contiguous()


def decoded_codes(codes_JO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scales, zero points) [J, O] in float32."""
    return (codes_JO & ~ZERO_BITS).view(torch.float32), (codes_JO & ZERO_BITS).float()


def block_of(inputs: int, group: int) -> int:
    """Return the columns of a block: so many that each of its planes lies in one group; 0 where there is none."""
    fitting = (block for block in BLOCKS if inputs % block == 0 and group % (block // PLANES) == 0)
    return next(fitting, 0)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Return the numbers [O, I] of words."""
    planes = torch.stack([words >> 4 * plane & LARGEST for plane in range(PLANES)], 2)
    return planes.transpose(0, 1).flatten(1)
