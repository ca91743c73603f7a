"""Dense weights that become blocks of small numbers once they are loaded.

Legend: T rows of activations, O outputs, I inputs, J blocks of inputs, B bytes, X experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F

from jackfield.interfaces import LayerInfo, ParameterHolder, ParameterSpec, QuantizedActivation
from jackfield_native.products import Part
from jackfield_quantization.native_schemes import NativeScheme
from jackfield_quantization.packing import E2M1, NF4, exponents, from_table, unpack_nibbles
from jackfield_quantization.unquantized_scheme import WEIGHT, DenseScheme

SCALE, ZERO, GLOBAL = "weight_scale", "weight_zero", "weight_global_scale"
Blocks = Mapping[str, torch.Tensor]
"""Parameters of a converted matrix, by name."""
LARGEST_INT8, LARGEST_INT4, LARGEST_FP8, LARGEST_FP4 = 127, 15, 448, 6
SMALLEST = 2.0**-24
"""The least positive float16: no scale is smaller, so that nothing is divided by 0."""
LEAST_FP8 = 2.0**-9
"""The same of float8_e4m3fn."""
SPANS = tuple(1.0 - step / 40 for step in range(1, 13))
"""Parts of a block's span of numbers that are tried."""
CHUNK = 1 << 22
"""Numbers that are converted at once."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Both ways: ``encode`` takes float32 [O, J, block], and by name what ``whole`` makes of the whole matrix, and
    gives parameters; ``names`` are those of both. ``decode`` gives float32 [O, I].
    """

    names: tuple[str, ...]
    block: int
    encode: Callable[..., Blocks]
    decode: Callable[[Blocks], torch.Tensor]
    whole: Callable[[torch.Tensor], Blocks] | None = None


def _int8(blocks: torch.Tensor) -> Blocks:
    scale = (blocks.abs().amax(-1) / LARGEST_INT8).clamp_min(SMALLEST).half()
    values = (blocks / scale.float().unsqueeze(-1)).round().clamp(-LARGEST_INT8, LARGEST_INT8)
    return {WEIGHT: values.to(torch.int8).flatten(1), SCALE: scale}


def _from_int8(stored: Blocks) -> torch.Tensor:
    return _scaled(stored[WEIGHT].float(), stored[SCALE].float())


def _int4(blocks: torch.Tensor) -> Blocks:
    """Of some spans, each a little smaller than the block's own, the one that moves its numbers least is taken."""
    least, most = blocks.amin(-1).clamp_max(0), blocks.amax(-1).clamp_min(0)
    best = _int4_of_span(blocks, least, most)
    error = _moved(blocks, best)
    for part in SPANS:
        other = _int4_of_span(blocks, least * part, most * part)
        found = _moved(blocks, other)
        better = found < error
        error = torch.where(better, found, error)
        best = tuple(torch.where(_beside(better, a), b, a) for a, b in zip(best, other, strict=True))
    values, scale, zero = best
    return {WEIGHT: _pairs(values), SCALE: scale, ZERO: zero.to(torch.uint8)}


def _int4_of_span(blocks: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return (numbers [O, J, block], scales [O, J], zero points [O, J]) for spans of [O, J]."""
    scale = ((most - least) / LARGEST_INT4).clamp_min(SMALLEST).half()
    wide = scale.float()
    zero = (-least / wide).round().clamp(0, LARGEST_INT4)
    values = (blocks / wide.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, LARGEST_INT4)
    return values, scale, zero


def _moved(blocks: torch.Tensor, made: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the sum of squared differences of each block, [O, J]."""
    values, scale, zero = made
    return ((values - zero.unsqueeze(-1)) * scale.float().unsqueeze(-1) - blocks).square().sum(-1)


def _beside(choice: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return choice if other.dim() == choice.dim() else choice.unsqueeze(-1)


def _from_int4(stored: Blocks) -> torch.Tensor:
    scale, zero = stored[SCALE].float(), stored[ZERO].float()
    values = torch.unflatten(unpack_nibbles(stored[WEIGHT]).float(), -1, (scale.shape[-1], -1))
    found: torch.Tensor = ((values - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(-2)
    return found


def _mxfp8(blocks: torch.Tensor) -> Blocks:
    """The exponent is the least with which no number is cut off."""
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1) / LARGEST_FP8)).clamp(-127, 127)
    values = torch.ldexp(blocks, -exponent.unsqueeze(-1))
    return {WEIGHT: values.to(torch.float8_e4m3fn).flatten(1), SCALE: (exponent + 127).to(torch.uint8)}


def _from_mxfp8(stored: Blocks) -> torch.Tensor:
    return _scaled(stored[WEIGHT].float(), exponents(stored[SCALE]))


def _largest(weight_OI: torch.Tensor) -> Blocks:
    """Return what scales of blocks are multiplied by, so that the largest of them is the largest 8-bit float."""
    largest = weight_OI.abs().amax().float().clamp_min(torch.finfo(torch.float32).tiny)
    return {GLOBAL: (LARGEST_FP8 * LARGEST_FP4 / largest).clamp_max(torch.finfo(torch.float32).max).reshape(1)}


def _nvfp4(blocks: torch.Tensor, *, weight_global_scale: torch.Tensor) -> Blocks:
    """Numbers between two others go to the nearer one, and from the middle to the one with an even code."""
    scale = blocks.abs().amax(-1) / LARGEST_FP4 * weight_global_scale
    scale = scale.clamp(LEAST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    edges = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1[: len(E2M1) // 2])], device=blocks.device)
    edges[1::2] = torch.nextafter(edges[1::2], torch.zeros_like(edges[1::2]))
    values = blocks / (scale.float() / weight_global_scale).unsqueeze(-1)
    codes = torch.bucketize(values.abs(), edges) + 8 * torch.signbit(values)
    return {WEIGHT: _pairs(codes), SCALE: scale}


def _from_nvfp4(stored: Blocks) -> torch.Tensor:
    return _scaled(from_table(unpack_nibbles(stored[WEIGHT]), E2M1), stored[SCALE].float() / stored[GLOBAL])


def _nf4(blocks: torch.Tensor) -> Blocks:
    scale = blocks.abs().amax(-1)
    table = torch.tensor(NF4, device=blocks.device)
    edges = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / scale.clamp_min(SMALLEST).unsqueeze(-1), edges)
    return {WEIGHT: _pairs(codes), SCALE: scale}


def _from_nf4(stored: Blocks) -> torch.Tensor:
    return _scaled(from_table(unpack_nibbles(stored[WEIGHT]), NF4), stored[SCALE])


CONVERSIONS: Mapping[str, Conversion] = {
    "int8": Conversion((WEIGHT, SCALE), 32, _int8, _from_int8),
    "int4": Conversion((WEIGHT, SCALE, ZERO), 32, _int4, _from_int4),
    "mxfp8": Conversion((WEIGHT, SCALE), 32, _mxfp8, _from_mxfp8),
    "nf4": Conversion((WEIGHT, SCALE), 64, _nf4, _from_nf4),
    "nvfp4": Conversion((WEIGHT, SCALE, GLOBAL), 16, _nvfp4, _from_nvfp4, _largest),
}
"""By name of the method."""


def encode(weight_OI: torch.Tensor, conversion: Conversion) -> dict[str, torch.Tensor]:
    """Return a matrix in blocks; converted some rows at a time, so that no second copy in float32 is in memory."""
    step = max(1, CHUNK // weight_OI.shape[1])
    rows = torch.split(weight_OI, step)
    whole = conversion.whole(weight_OI) if conversion.whole is not None else {}
    parts = [conversion.encode(torch.unflatten(part.float(), 1, (-1, conversion.block)), **whole) for part in rows]
    return {name: _joined([part[name] for part in parts]) for name in parts[0]} | dict(whole)


def stored_in(layer: ParameterHolder, conversion: Conversion) -> dict[str, torch.Tensor]:
    """Return the parameters of a converted layer."""
    return {name: layer.get_parameter(name).detach() for name in conversion.names}


class BlockScheme(DenseScheme):
    """Expanded before each product."""

    def __init__(self, name: str) -> None:
        self._conversion = CONVERSIONS[name]

    def finalize(self, layer: ParameterHolder) -> None:
        """Convert the weight, each of the matrices that are stacked by itself."""
        matrices = torch.split(layer.get_parameter(WEIGHT).detach(), list(layer.info.local_output_sizes))
        parts = [_by_output(encode(matrix, self._conversion)) for matrix in matrices]
        layer.replace_parameters({name: _joined([part[name] for part in parts]) for name in self._conversion.names})

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
            raise TypeError("blocks take plain activations")
        made = F.linear(x_TI, self._conversion.decode(stored_in(layer, self._conversion)).to(x_TI.dtype), bias_O)
        return made if out_TO is None else out_TO.copy_(made)

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the weight [O, I] in the computation type."""
        return self._conversion.decode(stored_in(layer, self._conversion)).to(getattr(torch, layer.info.dtype))


class MaybeNative(NativeScheme):
    """Blocks that kernels in C multiply with as they are, on a CPU; elsewhere expanded before each product."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._expanded: BlockScheme | None = None

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return the dense weight."""
        return DenseScheme().parameters(info)

    def finalize(self, layer: ParameterHolder) -> None:
        """Convert the weight."""
        # The kernels compute in these types.
        if layer.get_parameter(WEIGHT).device.type != "cpu" or layer.info.dtype not in ("float32", "bfloat16"):
            self._expanded = BlockScheme(self._name)
            self._expanded.finalize(layer)
            return
        stored = encode(layer.get_parameter(WEIGHT).detach(), CONVERSIONS[self._name])
        layer.replace_parameters({WEIGHT: NATIVE[self._name][1](stored)})

    def parts(self, layer: ParameterHolder) -> Sequence[Part]:
        """See NativeScheme."""
        return ((layer.get_parameter(WEIGHT), NATIVE[self._name][0]),)

    def apply(
        self,
        layer: ParameterHolder,
        x_TI: torch.Tensor | QuantizedActivation,
        bias_O: torch.Tensor | None,
        out_TO: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See NativeScheme."""
        if self._expanded is not None:
            return self._expanded.apply(layer, x_TI, bias_O, out_TO)
        return super().apply(layer, x_TI, bias_O, out_TO)

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the weight [O, I] in the computation type."""
        return super().dequantize(layer) if self._expanded is None else self._expanded.dequantize(layer)


class BlockExperts(DenseScheme):
    """Base of experts that become a published layout, one by one."""

    def finalize(self, layer: ParameterHolder) -> None:
        """Convert the experts."""
        conversion = CONVERSIONS[self.layout]
        parts = [encode(wide_OI, conversion) for wide_OI in layer.get_parameter(WEIGHT).detach()]
        layer.replace_parameters({name: torch.stack([part[name] for part in parts]) for name in parts[0]})

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the experts [X, O, I] in float32."""
        conversion = CONVERSIONS[self.layout]
        stored = stored_in(layer, conversion)
        count = len(stored[WEIGHT])
        return torch.stack([conversion.decode({k: t[x] for k, t in stored.items()}) for x in range(count)])


class Int8Experts(BlockExperts):
    """Experts in the layout ``int8``."""

    layout: ClassVar[str] = "int8"


class Int4Experts(BlockExperts):
    """Experts in the layout ``int4``."""

    layout: ClassVar[str] = "int4"


def _as_q8_0(stored: Blocks) -> torch.Tensor:
    """Return bytes [O, J * 34]: a scale in float16 and 32 numbers."""
    scale = stored[SCALE].unsqueeze(-1).view(torch.uint8)
    values = torch.unflatten(stored[WEIGHT].view(torch.uint8), 1, (-1, 32))
    return torch.cat((scale, values), -1).flatten(1)


def _as_q4_1(stored: Blocks) -> torch.Tensor:
    """Return bytes [O, J * 20]: a scale and a least number in float16, then 32 numbers, the second half of them in the
    high four bits.
    """
    scale = stored[SCALE]
    least = (-stored[ZERO].float() * scale.float()).half()
    values = torch.unflatten(unpack_nibbles(stored[WEIGHT]), 1, (-1, 32))
    packed = values[..., :16] | values[..., 16:] << 4
    head = torch.stack((scale, least), -1).view(torch.uint8)
    return torch.cat((head, packed), -1).flatten(1)


NATIVE: Mapping[str, tuple[str, Callable[[Blocks], torch.Tensor]]] = {
    "int8": ("Q8_0", _as_q8_0),
    "int4": ("Q4_1", _as_q4_1),
}
"""The kernels' words for blocks, and how they want them."""


def _by_output(stored: Blocks) -> Blocks:
    """Return parameters with a row for each output, also of what belongs to the whole matrix."""
    rows = len(stored[WEIGHT])
    return {name: found if len(found) == rows else found.expand(rows, 1) for name, found in stored.items()}


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if parts[0].dtype != torch.float8_e4m3fn:
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes [O, I / 2] of codes [O, J, block], the even column in the low four bits."""
    flat = codes.to(torch.uint8).flatten(1)
    return flat[:, 0::2] | flat[:, 1::2] << 4


def _scaled(values_OI: torch.Tensor, scale_OJ: torch.Tensor) -> torch.Tensor:
    blocks = torch.unflatten(values_OI, -1, (scale_OJ.shape[-1], -1))
    found: torch.Tensor = (blocks * scale_OJ.unsqueeze(-1)).flatten(-2)
    return found
