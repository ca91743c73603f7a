"""Checkpoints of four-bit whole numbers that stay packed, on CUDA devices. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jackfield.interfaces import Band, LayerInfo, LinearScheme, Preference, QuantizationRequest, Reason
from jackfield_quantization.auto_round import AutoRound
from jackfield_quantization.awq import Awq
from jackfield_quantization.compressed_tensors import CompressedTensors
from jackfield_quantization.gptq import Gptq
from jackfield_quantization.stored_method import StoredMethod
from jackfield_triton.launch import capability_reasons

BLOCKS = (128, 64)
"""Columns whose numbers may share words; the most are taken."""
PLANES = 4
"""Numbers in a word."""


class TritonPacked(StoredMethod):
    """Base: four-bit numbers in groups become bytes that a Triton kernel expands in registers. Layers that cannot
    (other widths, columns that fill no block) become dense, and so do experts.
    """

    features: ClassVar[frozenset[str]] = StoredMethod.features - {"batch_invariant"}
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.2",)
    opt_in: ClassVar[bool] = True
    """Products have run on an H200, but no whole model has yet."""

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Reject devices below capability 8.0."""
        return [*super().check(request), *capability_reasons(request.device)]

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "weights stay packed and are expanded in registers")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme | None:
        """See StoredMethod."""
        storages = cls.storages(info, spec)
        if storages is None or info.num_experts or info.role == "embedding":
            return super().scheme(info, spec)
        from jackfield_quantization.triton_packed_scheme import TritonPackedScheme

        return TritonPackedScheme(storages)


class TritonGptq(TritonPacked, Gptq):
    """``gptq``, packed."""

    name: ClassVar[str] = "triton_gptq"
    summary: ClassVar[str] = "GPTQ of four bits, packed; a Triton kernel expands in registers"


class TritonAwq(TritonPacked, Awq):
    """``awq``, packed."""

    name: ClassVar[str] = "triton_awq"
    summary: ClassVar[str] = "AWQ, packed; a Triton kernel expands in registers"


class TritonCompressedTensors(TritonPacked, CompressedTensors):
    """``compressed_tensors``, packed."""

    name: ClassVar[str] = "triton_compressed_tensors"
    summary: ClassVar[str] = "compressed-tensors of four bits, packed; a Triton kernel expands in registers"


class TritonAutoRound(TritonPacked, AutoRound):
    """``auto_round``, packed."""

    name: ClassVar[str] = "triton_auto_round"
    summary: ClassVar[str] = "AutoRound of four bits, packed; a Triton kernel expands in registers"
