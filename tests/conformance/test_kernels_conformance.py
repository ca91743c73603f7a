"""The kit's tests of quantization methods, expert kernels and ops, through the project's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from suites import suite

from jackfield.testing import ExpertsConformance, OpsConformance, QuantizationConformance
from jackfield.testing.quantization import Stored
from jackfield_moe.torch_experts import TorchExperts
from jackfield_moe.torch_grouped import TorchGrouped
from jackfield_moe.triton_experts import TritonExperts
from jackfield_native.toolchain import unavailable
from jackfield_ops.native_ops import NativeOps
from jackfield_ops.torch_ops import TorchOps
from jackfield_ops.triton_ops import TritonOps
from jackfield_quantization.fp8 import Fp8
from jackfield_quantization.fp8_checkpoint import Fp8Checkpoint
from jackfield_quantization.gguf import Gguf
from jackfield_quantization.gptq import Gptq
from jackfield_quantization.native_dense import NativeDense
from jackfield_quantization.native_gguf import NativeGguf
from jackfield_quantization.triton_dense import TritonDense
from jackfield_quantization.unquantized import Unquantized


def q8_0(self: Any, weight_OI: torch.Tensor) -> Mapping[str, Stored]:
    """Pack by the gguf package."""
    import gguf

    packed = gguf.quants.quantize(weight_OI.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    return {"weight": Stored(torch.from_numpy(packed.copy()), "ggml:Q8_0", tuple(weight_OI.shape))}


def words(numbers: torch.Tensor) -> torch.Tensor:
    """Pack numbers of four bits along the last dimension, eight in an int32, the first one lowest."""
    shifts = torch.arange(0, 32, 4)
    packed = (numbers.long().view(*numbers.shape[:-1], -1, 8) << shifts).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def gptq(self: Any, weight_OI: torch.Tensor) -> Mapping[str, Stored]:
    """Pack as GPTQ does: four bits, a scale for 128 inputs, the zero point 8 stored less one."""
    groups_OJG = weight_OI.float().view(len(weight_OI), -1, 128)
    scales_OJ = (groups_OJG.abs().amax(-1) / 7).half()
    q_OI = ((groups_OJG / scales_OJ.float().unsqueeze(-1)).round() + 8).clamp(0, 15).flatten(1)
    zeros_JO = torch.full(scales_OJ.T.shape, 7)
    return {
        "qweight": Stored(words(q_OI).T.contiguous()),
        "scales": Stored(scales_OJ.T.contiguous()),
        "qzeros": Stored(words(zeros_JO)),
        "g_idx": Stored(torch.arange(weight_OI.shape[1], dtype=torch.int32) // 128),
    }


def fp8_blocks(self: Any, weight_OI: torch.Tensor) -> Mapping[str, Stored]:
    """Pack as DeepSeek's checkpoints do: float8_e4m3fn with a scale for each block of 128 by 128."""
    rows, columns = -(-len(weight_OI) // 128), weight_OI.shape[1] // 128
    padded = torch.nn.functional.pad(weight_OI.float(), (0, 0, 0, rows * 128 - len(weight_OI)))
    blocks = padded.view(rows, 128, columns, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scales.view(rows, 1, columns, 1)).view(padded.shape)[: len(weight_OI)]
    return {"weight": Stored(stored.to(torch.float8_e4m3fn)), "weight_scale_inv": Stored(scales)}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TestGptq = suite(QuantizationConformance, Gptq, kind="gptq", config=GPTQ, pack=gptq, loss=0.12)
TestFp8Checkpoint = suite(QuantizationConformance, Fp8Checkpoint, kind="fp8", config=FP8, pack=fp8_blocks, loss=0.05)
TestUnquantized = suite(QuantizationConformance, Unquantized, loss=0.0)
TestTritonDense = suite(QuantizationConformance, TritonDense, loss=0.0)
TestFp8 = suite(QuantizationConformance, Fp8, loss=0.05, cut_tolerance=0.05)
TestGguf = suite(QuantizationConformance, Gguf, pack=q8_0, loss=0.01)
TestTorchExperts = suite(ExpertsConformance, TorchExperts)
TestTorchGrouped = suite(ExpertsConformance, TorchGrouped)
TestTritonExperts = suite(ExpertsConformance, TritonExperts)
TestTorchOps = suite(OpsConformance, TorchOps)
TestTritonOps = suite(OpsConformance, TritonOps)
if not unavailable():
    TestNativeDense = suite(QuantizationConformance, NativeDense, loss=0.01)
    TestNativeGguf = suite(QuantizationConformance, NativeGguf, pack=q8_0, loss=0.01)
    TestNativeOps = suite(OpsConformance, NativeOps)
