"""Converted weights as compressed-tensors checkpoints, which ``compressed_tensors`` and other engines read.

Legend: O outputs, I inputs, J blocks of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from jackfield.interfaces import Exporter
from jackfield.layers.functional import quantize_rows
from jackfield_quantization.online_schemes import CONVERSIONS, GLOBAL, SCALE, ZERO, encode
from jackfield_quantization.packing import packed_words, unpack_nibbles
from jackfield_quantization.unquantized_scheme import WEIGHT

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class CompressedExporter(Exporter):
    """One group that means all linear layers.

    Args:
        form: ``format`` of the checkpoint. weights: its ``QuantizationArgs``. make: tensors of a module. inputs: how
            activations are to be quantized, or None.
    """

    form: str
    weights: Mapping[str, object]
    make: Callable[[torch.Tensor], Tensors]
    inputs: Mapping[str, object] | None = None

    def config(self, plain: Sequence[str]) -> Mapping[str, object]:
        """See Exporter."""
        group = {
            "targets": ["Linear"],
            "weights": dict(self.weights),
            "input_activations": None if self.inputs is None else dict(self.inputs),
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(plain),
        }

    def tensors(self, weight_OI: torch.Tensor) -> Tensors:
        """See Exporter."""
        return self.make(weight_OI)


def _fp8(weight_OI: torch.Tensor) -> Tensors:
    rows = quantize_rows(weight_OI)
    return {WEIGHT: rows.values, SCALE: rows.scales.unsqueeze(-1)}


def _int8(weight_OI: torch.Tensor) -> Tensors:
    stored = encode(weight_OI, CONVERSIONS["int8"])
    words = packed_words(stored[WEIGHT].int() + 128, 8)
    return {"weight_packed": words, SCALE: stored[SCALE], "weight_shape": torch.tensor(weight_OI.shape)}


def _int4(weight_OI: torch.Tensor) -> Tensors:
    stored = encode(weight_OI, CONVERSIONS["int4"])
    zeros_JO = stored[ZERO].t()
    return {
        "weight_packed": packed_words(unpack_nibbles(stored[WEIGHT]), 4),
        SCALE: stored[SCALE],
        "weight_zero_point": packed_words(zeros_JO, 4).t().contiguous(),
        "weight_shape": torch.tensor(weight_OI.shape),
    }


def _mxfp8(weight_OI: torch.Tensor) -> Tensors:
    return encode(weight_OI, CONVERSIONS["mxfp8"])


def _nvfp4(weight_OI: torch.Tensor) -> Tensors:
    stored = encode(weight_OI, CONVERSIONS["nvfp4"])
    return {"weight_packed": stored[WEIGHT], SCALE: stored[SCALE], GLOBAL: stored[GLOBAL]}


def _args(bits: int, kind: str, strategy: str, *, symmetric: bool = True, **others: object) -> dict[str, object]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False, **others}


TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
EXPORTERS: Mapping[str, CompressedExporter] = {
    "fp8": CompressedExporter("float-quantized", _args(8, "float", "channel"), _fp8, TOKENS),
    "int8": CompressedExporter("pack-quantized", _args(8, "int", "group", group_size=32), _int8),
    "int4": CompressedExporter("pack-quantized", _args(4, "int", "group", group_size=32, symmetric=False), _int4),
    "mxfp8": CompressedExporter(
        "mxfp8-quantized", _args(8, "float", "group", group_size=32, scale_dtype="torch.uint8"), _mxfp8
    ),
    "nvfp4": CompressedExporter(
        "nvfp4-pack-quantized",
        _args(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
        _nvfp4,
    ),
}
"""By name of the method."""
