"""What torchao itself makes of a matrix, where it is installed. ``python torchao_writer.py FOLDER`` writes the
golden files.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NAME = "model.layers.0.self_attn.o_proj"
OUTPUTS, INPUTS, GROUP = 16, 64, 32
PADDED = 1024
"""Inputs of tiles: torchao pads them to a multiple of this."""


def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(OUTPUTS, INPUTS, generator=generator) * torch.logspace(-1, 0.5, OUTPUTS)[:, None]).bfloat16()


def quantized(config: Any) -> Any:
    """Return the weight of a layer that torchao quantizes."""
    from torchao.quantization import quantize_

    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False).bfloat16()
    layer.weight.data = weight()
    quantize_(layer, config)
    return layer.weight.detach()


def tensors() -> dict[str, Any]:
    """Return tensors of torchao's classes, by name."""
    return {**whole_numbers(), **floats(), **four_bits(), **microscaled()}


def whole_numbers() -> dict[str, Any]:
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8StaticActivationInt8WeightConfig,
        Int8Tensor,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
        PerRow,
        PerTensor,
    )
    from torchao.quantization.quant_primitives import MappingType

    groups = {"weight_dtype": torch.int4, "granularity": PerGroup(GROUP)}
    return {
        "int8_weight_only": quantized(Int8WeightOnlyConfig(version=2)),
        "int8_tensor": quantized(Int8WeightOnlyConfig(version=2, granularity=PerTensor())),
        "int8_groups": quantized(Int8WeightOnlyConfig(version=2, granularity=PerGroup(GROUP))),
        "int8_dynamic": quantized(Int8DynamicActivationInt8WeightConfig(version=2)),
        "int8_static": quantized(Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.full((1, 1), 0.1))),
        "int8_prepared": Int8Tensor.from_hp(weight(), PerRow(), act_pre_scale=torch.linspace(0.5, 2, INPUTS)),
        "int4_weight_only": quantized(IntxWeightOnlyConfig(**groups)),
        "int4_dynamic": quantized(
            Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(GROUP))
        ),
        "int3_outputs": quantized(
            IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=PerAxis(0), mapping_type=MappingType.ASYMMETRIC)
        ),
    }


def floats() -> dict[str, Any]:
    from torchao.quantization import Float8Tensor, PerBlock, PerGroup, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    def made(granularity: Any, **options: Any) -> Any:
        return Float8Tensor.from_hp(weight(), granularity=granularity, **options)

    return {
        "float8_weight_only": made(PerRow()),
        "float8_dynamic": made(PerRow(), act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=PerRow())),
        "float8_tensor": made(PerTensor()),
        "float8_groups": made(PerGroup(GROUP)),
        "float8_blocks": made(PerBlock([8, GROUP])),
        "float8_wide": made(PerRow(), float8_dtype=torch.float8_e5m2),
    }


def four_bits() -> dict[str, Any]:
    """Return tensors that the library makes on GPUs alone, of what it does before it packs."""
    from torchao.quantization import Int4PlainInt32Tensor, Int4Tensor, Int4TilePackedTo4dTensor

    generator = torch.Generator().manual_seed(5)
    packed = torch.randint(-128, 128, (OUTPUTS, INPUTS // 2), generator=generator).to(torch.int8)
    scale, zero = (torch.rand(INPUTS // GROUP, OUTPUTS, generator=generator).bfloat16() for _ in range(2))
    numbers, scales, zeros = affine()
    # One byte of XPU's word has two numbers, the first in the low half; the bytes follow one another.
    words = (numbers[:, 1::2] << 4 | numbers[:, ::2]).to(torch.uint8).contiguous().view(torch.int32)
    turned = scales.t().contiguous(), zeros.t().contiguous().to(torch.int8)
    tiles, pairs = tiled()
    shape = torch.Size((OUTPUTS, INPUTS))
    return {
        "int4_pairs": Int4Tensor(packed, scale, zero, [1, GROUP], shape),
        "int4_words": Int4PlainInt32Tensor(words, *turned, [1, GROUP], shape),
        "int4_tiles": Int4TilePackedTo4dTensor(tiles, pairs, [1, GROUP], shape),
        "int4_tiles_prepared": Int4TilePackedTo4dTensor(
            tiles, pairs, [1, GROUP], shape, torch.linspace(0.5, 2, INPUTS)
        ),
    }


def affine() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers from 0 to 15, scales and zero points [O, J], as torchao finds them for XPUs."""
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

    block, kind = (1, GROUP), torch.int32
    scale, zero = choose_qparams_affine(
        weight(), MappingType.ASYMMETRIC, block, kind, 0, 15, 1e-6, zero_point_dtype=torch.int32
    )
    numbers = quantize_affine(weight(), block, scale, zero, kind, 0, 15)
    return numbers, scale.reshape(OUTPUTS, -1), zero.reshape(OUTPUTS, -1)


def tinygemm() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers from 0 to 15, scales and what 8 stands for, of inputs padded to 1024, as torchao finds them."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        _choose_qparams_affine_tinygemm,
        _quantize_affine_tinygemm,
    )

    padded = torch.nn.functional.pad(weight(), (0, PADDED - INPUTS))
    block, kind = (1, GROUP), torch.int32
    types = {"scale_dtype": torch.bfloat16, "zero_point_dtype": torch.bfloat16}
    scale, zero = _choose_qparams_affine_tinygemm(
        padded, MappingType.ASYMMETRIC, block, kind, quant_min=0, quant_max=15, **types
    )
    numbers = _quantize_affine_tinygemm(padded, block, scale, zero, kind, quant_min=0, quant_max=15)
    return numbers, scale, zero


def tiled() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tiles, and pairs of scales and zeros, as the library packs them."""
    from torchao.quantization.utils import pack_tinygemm_scales_and_zeros

    numbers, scale, zero = tinygemm()
    pairs = pack_tinygemm_scales_and_zeros(scale.view(OUTPUTS, -1), zero.view(OUTPUTS, -1), torch.bfloat16)
    return tiles_of(numbers), pairs


def tiles_of(numbers: torch.Tensor, inner: int = 8) -> torch.Tensor:
    """Return numbers from 0 to 15 [O, I] as PyTorch's kernel packs them on CUDA, thread by thread."""
    (rows, columns), grid = numbers.shape, numbers.tolist()
    shape, words = (rows // 8, columns // (16 * inner), 32, inner // 2), []
    for row_tile, column_tile, thread, word in product(*map(range, shape)):
        first = (column_tile * inner + 2 * word) * 16 + thread % 4 * 2
        of_thread = [first + step for step in (0, 1, 8, 9, 16, 17, 24, 25)]
        nibbles = [grid[row_tile * 8 + thread // 4][column] for column in of_thread]
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        words.append(sum(nibbles[n] << 4 * place for place, n in enumerate(order)))
    return torch.tensor(words).view(shape).to(torch.uint32).view(torch.int32)


def microscaled() -> dict[str, Any]:
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization.quantize_.common import KernelPreference

    def mx(kind: Any, *, swizzled: bool) -> Any:
        preference = KernelPreference.EMULATED
        return MXTensor.to_mx(weight(), kind, 32, is_swizzled_scales=swizzled, kernel_preference=preference)

    whole, act = per_tensor_amax_to_scale(weight().abs().max()), torch.tensor(0.5)
    return {
        "mxfp8": mx(torch.float8_e4m3fn, swizzled=True),
        "mxfp8_plain": mx(torch.float8_e4m3fn, swizzled=False),
        "mxfp8_wide": mx(torch.float8_e5m2, swizzled=True),
        "mxfp4": mx(torch.float4_e2m1fn_x2, swizzled=True),
        "mxfp4_plain": mx(torch.float4_e2m1fn_x2, swizzled=False),
        "mxfp6_e2m3": mx("fp6_e2m3", swizzled=True),
        "mxfp6_e3m2": mx("fp6_e3m2", swizzled=False),
        "nvfp4": quantized(NVFP4WeightOnlyConfig()),
        "nvfp4_one_scale": quantized(NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False)),
        "nvfp4_plain": NVFP4Tensor.to_nvfp4(weight(), per_tensor_scale=whole, act_per_tensor_scale=act),
    }


def meaning(tensor: Any) -> torch.Tensor:
    """Return the float32 matrix that a tensor stands for; where the library cannot say it of a tensor without a GPU,
    it says it of what was packed.
    """
    from torchao.quantization import quant_primitives as primitives

    kind = type(tensor).__name__
    if kind == "IntxUnpackedToInt8Tensor":
        least, most = primitives._DTYPE_TO_QVALUE_BOUNDS[tensor.target_dtype]
        wide: torch.Tensor = primitives.dequantize_affine(
            tensor.qdata, tensor.block_size, tensor.scale.float(), tensor.zero_point, torch.int8, least, most
        )
        return wide
    if kind == "Int4Tensor":
        low, high = tensor.qdata.int() & 15, (tensor.qdata.int() >> 4) & 15
        codes = torch.stack((low, high), -1).flatten(1)
        signed = torch.where(codes > 7, codes - 16, codes).float()
        scale, zero = (part.float().t().repeat_interleave(GROUP, 1) for part in (tensor.scale, tensor.zero_point))
        return signed * scale + zero
    if kind == "Int4PlainInt32Tensor":
        numbers, scale, zero = affine()
        wide = primitives.dequantize_affine(numbers, (1, GROUP), scale.float(), zero, torch.int32, 0, 15)
    elif kind == "Int4TilePackedTo4dTensor":
        numbers, scale, zero = tinygemm()
        parts = scale.float(), zero.float(), torch.int32, 0, 15
        wide = primitives._dequantize_affine_tinygemm(numbers, (1, GROUP), *parts)[:, :INPUTS]
    else:
        wide = tensor.dequantize(torch.float32)
    prepared = getattr(tensor, "act_pre_scale", None)
    return wide if prepared is None else wide * prepared


def write(folder: Path) -> None:
    """Write every tensor in both containers, and what they stand for."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    meanings = {}
    for kind, tensor in tensors().items():
        state = {f"{NAME}.weight": tensor}
        flat, metadata = flatten_tensor_state_dict(state)
        save_file(flat, folder / f"{kind}.safetensors", metadata=metadata)
        torch.save(state, folder / f"{kind}.bin")
        meanings[kind] = meaning(tensor).contiguous()
    save_file(meanings, folder / "meanings.safetensors")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
