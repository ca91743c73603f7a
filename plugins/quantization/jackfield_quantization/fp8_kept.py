"""Checkpoints in 8-bit floats that stay so, on CUDA devices that multiply them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jackfield.interfaces import Band, LayerInfo, LinearScheme, Preference, QuantizationRequest, Reason
from jackfield_quantization.compressed_tensors import CompressedTensors
from jackfield_quantization.fp8 import fits_matrix_units, lacks_matrix_units
from jackfield_quantization.fp8_checkpoint import Fp8Checkpoint
from jackfield_quantization.modelopt import Modelopt
from jackfield_quantization.quark import Quark
from jackfield_quantization.stored_method import StoredMethod


class KeptFp8(StoredMethod):
    """Base: linear layers with one scale for a matrix or for each output stay in 8-bit floats; activations are
    quantized token by token where there are many, whether the checkpoint has scales for them or not. All else is as the
    method does it that this one derives from.
    """

    features: ClassVar[frozenset[str]] = StoredMethod.features - {"batch_invariant"} | {"quantized_activations"}
    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Reject devices without 8-bit floats, and checkpoints without them."""
        reasons = [*super().check(request), *lacks_matrix_units(request)]
        if request.storage_dtypes and "float8_e4m3fn" not in request.storage_dtypes:
            reasons.append(Reason("storage_dtype", "storage_dtypes", "no tensor is float8_e4m3fn"))
        return reasons

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "8-bit matrix units")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme | None:
        """See StoredMethod."""
        if fits_matrix_units(info) and (storages := cls.storages(info, spec)) is not None:
            from jackfield_quantization.fp8_kept_scheme import KeptFp8Scheme, can_be_kept

            if can_be_kept(info, storages):
                return KeptFp8Scheme(storages)
        return super().scheme(info, spec)


class KeptFp8Checkpoint(KeptFp8, Fp8Checkpoint):
    """``fp8_checkpoint``, kept."""

    name: ClassVar[str] = "fp8_checkpoint_kept"
    summary: ClassVar[str] = "fp8 checkpoints with scales per tensor or output, kept in fp8"


class KeptCompressedTensors(KeptFp8, CompressedTensors):
    """``compressed_tensors``, kept."""

    name: ClassVar[str] = "compressed_tensors_kept"
    summary: ClassVar[str] = "compressed-tensors checkpoints in fp8 with scales per tensor or output, kept in fp8"


class KeptModelopt(KeptFp8, Modelopt):
    """``modelopt``, kept."""

    name: ClassVar[str] = "modelopt_kept"
    summary: ClassVar[str] = "ModelOpt checkpoints in fp8 with scales per tensor or output, kept in fp8"


class KeptQuark(KeptFp8, Quark):
    """``quark``, kept."""

    name: ClassVar[str] = "quark_kept"
    summary: ClassVar[str] = "Quark checkpoints in fp8 with scales per tensor or output, kept in fp8"
