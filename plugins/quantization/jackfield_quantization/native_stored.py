"""Checkpoints of whole numbers that stay packed, on CPUs. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jackfield.interfaces import Band, LayerInfo, LinearScheme, Preference, QuantizationRequest, Reason
from jackfield_native.toolchain import unavailable
from jackfield_quantization.auto_round import AutoRound
from jackfield_quantization.awq import Awq
from jackfield_quantization.compressed_tensors import CompressedTensors
from jackfield_quantization.gptq import Gptq
from jackfield_quantization.stored_method import StoredMethod


class NativeStored(StoredMethod):
    """Base: whole numbers in groups of 32 or more become blocks that kernels in C multiply with as they are, bit for
    bit the values that dequantization gives. Layers that cannot (scales that float16 does not hold, groups of inputs
    in another order) become dense, and so do experts.
    """

    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cpu"})

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Reject machines that cannot build the kernels."""
        reason = unavailable()
        return [*super().check(request), *([reason] if reason else [])]

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "weights stay packed and are read once for few rows")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme | None:
        """See StoredMethod."""
        storages = cls.storages(info, spec)
        if storages is None or info.num_experts:
            return super().scheme(info, spec)
        from jackfield_quantization.native_stored_scheme import NativeStoredScheme

        return NativeStoredScheme(storages)


class NativeGptq(NativeStored, Gptq):
    """``gptq``, packed."""

    name: ClassVar[str] = "native_gptq"
    summary: ClassVar[str] = "GPTQ, packed; kernels in C"


class NativeAwq(NativeStored, Awq):
    """``awq``, packed."""

    name: ClassVar[str] = "native_awq"
    summary: ClassVar[str] = "AWQ, packed; kernels in C"


class NativeCompressedTensors(NativeStored, CompressedTensors):
    """``compressed_tensors``, packed."""

    name: ClassVar[str] = "native_compressed_tensors"
    summary: ClassVar[str] = "compressed-tensors checkpoints of whole numbers, packed; kernels in C"


class NativeAutoRound(NativeStored, AutoRound):
    """``auto_round``, packed."""

    name: ClassVar[str] = "native_auto_round"
    summary: ClassVar[str] = "AutoRound, packed; kernels in C"
