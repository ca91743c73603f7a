"""What torchao itself makes of a matrix, where it is installed. ``python torchao_writer.py FOLDER`` writes the
golden files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NAME = "model.layers.0.self_attn.o_proj"
OUTPUTS, INPUTS, GROUP = 16, 64, 32


def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(OUTPUTS, INPUTS, generator=generator) * torch.logspace(-1, 0.5, OUTPUTS)[:, None]).bfloat16()


def tensors() -> dict[str, Any]:
    """Return tensors of torchao's classes, by name."""
    from torchao.quantization import (
        Float8Tensor,
        Int4Tensor,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8Tensor,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        PerRow,
        PerTensor,
        quantize_,
    )
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    def quantized(config: Any) -> Any:
        layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False).bfloat16()
        layer.weight.data = weight()
        quantize_(layer, config)
        return layer.weight.detach()

    groups = {"weight_dtype": torch.int4, "granularity": PerGroup(GROUP)}
    generator = torch.Generator().manual_seed(5)
    packed = torch.randint(-128, 128, (OUTPUTS, INPUTS // 2), generator=generator).to(torch.int8)
    scale, zero = (torch.rand(INPUTS // GROUP, OUTPUTS, generator=generator).bfloat16() for _ in range(2))
    return {
        "int8_weight_only": quantized(Int8WeightOnlyConfig(version=2)),
        "int8_tensor": quantized(Int8WeightOnlyConfig(version=2, granularity=PerTensor())),
        "int8_dynamic": quantized(Int8DynamicActivationInt8WeightConfig(version=2)),
        "int8_prepared": Int8Tensor.from_hp(weight(), PerRow(), act_pre_scale=torch.linspace(0.5, 2, INPUTS)),
        "int4_weight_only": quantized(IntxWeightOnlyConfig(**groups)),
        "int4_dynamic": quantized(
            Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(GROUP))
        ),
        "float8_weight_only": Float8Tensor.from_hp(weight(), granularity=PerRow()),
        "float8_dynamic": Float8Tensor.from_hp(
            weight(), granularity=PerRow(), act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=PerRow())
        ),
        "float8_tensor": Float8Tensor.from_hp(weight(), granularity=PerTensor()),
        "int4_pairs": Int4Tensor(packed, scale, zero, [1, GROUP], torch.Size((OUTPUTS, INPUTS))),
    }


def meaning(tensor: Any) -> torch.Tensor:
    """Return the float32 matrix that a tensor stands for; the library cannot say it of pairs where there is no GPU."""
    from torchao.quantization.quant_primitives import dequantize_affine

    kind = type(tensor).__name__
    if kind == "IntxUnpackedToInt8Tensor":
        wide: torch.Tensor = dequantize_affine(
            tensor.qdata, tensor.block_size, tensor.scale.float(), tensor.zero_point, torch.int8, -8, 7
        )
        return wide
    if kind == "Int4Tensor":
        low, high = tensor.qdata.int() & 15, (tensor.qdata.int() >> 4) & 15
        codes = torch.stack((low, high), -1).flatten(1)
        signed = torch.where(codes > 7, codes - 16, codes).float()
        scale, zero = (part.float().t().repeat_interleave(GROUP, 1) for part in (tensor.scale, tensor.zero_point))
        return signed * scale + zero
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
