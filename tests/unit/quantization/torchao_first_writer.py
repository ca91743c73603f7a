"""What torchao made of a matrix in the first version of its tensors. ``python torchao_first_writer.py FOLDER`` writes
the golden files, with release 0.12.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torchao_writer import GROUP, INPUTS, NAME, quantized, tiles_of


def tensors() -> dict[str, Any]:
    """Return tensors of torchao's classes, by name."""
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt4WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    four = {"weight_dtype": torch.int4}
    return {
        "int8": quantized(Int8WeightOnlyConfig()),
        "int8_groups": quantized(Int8WeightOnlyConfig(group_size=GROUP)),
        "int8_dynamic": quantized(Int8DynamicActivationInt8WeightConfig()),
        "float8": quantized(Float8WeightOnlyConfig()),
        "intx": quantized(IntxWeightOnlyConfig(granularity=PerGroup(GROUP), **four)),
        "intx_dynamic": quantized(Int8DynamicActivationIntxWeightConfig(weight_granularity=PerGroup(GROUP), **four)),
        "int4_dynamic": quantized(Int8DynamicActivationInt4WeightConfig(group_size=GROUP)),
        "tiles": quantized(Int4WeightOnlyConfig(group_size=GROUP)),
    }


def register() -> None:
    """Give CPUs the operation that packs tiles, so that the library can do it there."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_convert_weight_to_int4pack", packed, "CPU")
    library.impl("_weight_int4pack_mm", product, "CPU")
    KEPT.append(library)


KEPT: list[Any] = []
"""What unregisters operations when it is gone."""


def packed(pairs: torch.Tensor, inner: int) -> torch.Tensor:
    """Return tiles of numbers that come two in a byte, the first in the high half."""
    return tiles_of(torch.stack((pairs >> 4, pairs & 15), -1).flatten(1).int(), inner)


def product(x: torch.Tensor, tiles: torch.Tensor, group: int, pairs: torch.Tensor) -> torch.Tensor:
    """Return products with tiles in float32: the library multiplies by the identity where it dequantizes."""
    numbers = torch.zeros(tiles.shape[0] * 8, tiles.shape[1] * 128)
    for row in range(numbers.shape[0]):
        for column in range(numbers.shape[1]):
            inner, rest = divmod(column, 128)
            word, rest = divmod(rest, 32)
            thread = row % 8 * 4 + rest % 8 // 2
            nibble = rest % 2 * 4 + rest // 16 * 2 + rest % 16 // 8
            numbers[row, column] = int(tiles[row // 8, inner, thread, word]) >> 4 * nibble & 15
    scale, zero = (pairs.float()[..., n].t().repeat_interleave(group, 1) for n in (0, 1))
    return x.float() @ ((numbers - 8) * scale + zero).t()


def meaning(tensor: Any) -> torch.Tensor:
    """Return the float32 matrix that a tensor stands for."""
    inner = getattr(tensor, "original_weight_tensor", tensor)
    if "Tiled" in type(inner.tensor_impl).__name__:
        parts = inner.tensor_impl
        wide = product(torch.eye(1024), parts.packed_weight, GROUP, parts.scale_and_zero)
        return wide.t()[:, :INPUTS]
    found: torch.Tensor = inner.dequantize(torch.float32)
    return found


def write(folder: Path) -> None:
    """Write every tensor, and what they stand for."""
    register()
    meanings = {}
    for kind, tensor in tensors().items():
        torch.save({f"{NAME}.weight": tensor}, folder / f"{kind}.bin")
        meanings[kind] = meaning(tensor).contiguous()
    save_file(meanings, folder / "meanings.safetensors")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
