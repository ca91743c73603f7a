"""``torchao``: checkpoints of tensors that are made of others, as that library saves them since its second version of
them. Each module says of itself how it is stored: the types and shapes of its tensors tell it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.fp8_kept import KeptFp8
from jackfield_quantization.native_stored import NativeStored
from jackfield_quantization.stored_method import StoredMethod, unreadable

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

START = "_weight_"
"""What names of a weight's parts begin with."""
NUMBERS, SCALE, ZERO, INPUTS = (f"{START}{part}" for part in ("qdata", "scale", "zero_point", "act_pre_scale"))
UNUSED = (f"{START}act_quant_scale", f"{START}act_quant_zero_point")
"""Of activations, which are not quantized."""
FLOATS = frozenset({"float8_e4m3fn", "float8_e5m2"})
REMEDY = "what is read: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor and Int4Tensor; load it there and save it so"


class TorchAo(StoredMethod):
    """8-bit floats, whole numbers of up to eight bits, and of four bits two in a byte, dequantized at load. Activations
    are not quantized.
    """

    name: ClassVar[str] = "torchao"
    summary: ClassVar[str] = "torchao checkpoints (fp8, int8, int4), dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"torchao"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> str:
        """Return the words of the configuration on how weights are quantized."""
        return str(config.get("quant_type", "")).lower()

    @classmethod
    def experts_layout(cls, spec: str) -> str:
        """Return the layout of experts; some may be dense."""
        return "fp8" if "float8" in spec else "dense"

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: Any) -> bool:
        """See StoredMethod."""
        return False

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return any(suffix.startswith(START) for suffix in facts)

    @classmethod
    def is_packed(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: Any) -> bool:
        """See StoredMethod. Only the checkpoint's tensors tell how long they are."""
        return cls.looks_packed(facts)

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: Any) -> Storage:
        """See StoredMethod."""
        from jackfield_quantization.scaled import ScaledStorage, Typed
        from jackfield_quantization.torchao_storage import PairsStorage, grid

        if NUMBERS not in facts or SCALE not in facts:
            parts = ", ".join(sorted(suffix for suffix in facts if suffix.startswith(START)))
            raise unreadable(info, source, f"nothing reads a weight that is made of {parts}", REMEDY)
        numbers, inputs = facts[NUMBERS], info.input_size
        if numbers.dtype in ("int8", "uint8") and numbers.shape[1:] == (inputs // 2,) and ZERO in facts:
            return PairsStorage(numbers.dtype)
        if numbers.dtype not in {"int8", *FLOATS} or numbers.shape[1:] != (inputs,):
            detail = f"nothing reads numbers of type {numbers.dtype} and shape {list(numbers.shape)}"
            raise unreadable(info, source, detail, REMEDY)
        if ZERO not in facts and "intx" in spec:
            raise unreadable(info, source, f"it lacks {ZERO}", "the checkpoint is incomplete")
        size = (numbers.shape[0], inputs)
        zero = grid(ZERO, facts[ZERO], size) if ZERO in facts else None
        scale = grid(SCALE, facts[SCALE], size)
        return ScaledStorage(Typed(numbers.dtype, NUMBERS), scale, zero=zero, inputs=INPUTS, unused=UNUSED)


class NativeTorchAo(NativeStored, TorchAo):
    """``torchao``, packed."""

    name: ClassVar[str] = "native_torchao"
    summary: ClassVar[str] = "torchao checkpoints of whole numbers, packed; kernels in C"


class KeptTorchAo(KeptFp8, TorchAo):
    """``torchao``, kept."""

    name: ClassVar[str] = "torchao_kept"
    summary: ClassVar[str] = "torchao checkpoints in fp8 with scales per tensor or output, kept in fp8"
