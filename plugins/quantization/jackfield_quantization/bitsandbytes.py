"""``bitsandbytes``: checkpoints in NF4, FP4 and LLM.int8()."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.matching import named, names_in, wrong
from jackfield_quantization.stored_method import WEIGHT, StoredMethod

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

FOUR_BITS, EIGHT_BITS = "weight.absmax", "SCB"
"""Tensors that tell what a module is in."""
KINDS = ("nf4", "fp4")


@dataclass(frozen=True, slots=True)
class BitsAndBytesSpec:
    """Modules that are plain."""

    ignored: tuple[str, ...] = ()


class BitsAndBytes(StoredMethod):
    """Four bits (NF4, FP4, scales quantized once more or not) and eight bits, dequantized at load."""

    name: ClassVar[str] = "bitsandbytes"
    summary: ClassVar[str] = "NF4, FP4 and LLM.int8() checkpoints, dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"bitsandbytes"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> BitsAndBytesSpec:
        """Return the spec.

        Raises:
            ConfigError: a value is not known.
        """
        kind = config.get("bnb_4bit_quant_type", "nf4")
        if config.get("load_in_4bit") and kind not in KINDS:
            raise wrong("bnb_4bit_quant_type", kind, "one of nf4, fp4")
        return BitsAndBytesSpec(names_in(config, "llm_int8_skip_modules"))

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: BitsAndBytesSpec) -> bool:
        """See StoredMethod. The checkpoint's own tensors are the better witness: writers skip more than they list."""
        return not info.tensors and named(source, spec.ignored)

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return FOUR_BITS in facts or EIGHT_BITS in facts

    @classmethod
    def is_packed(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: BitsAndBytesSpec) -> bool:
        """See StoredMethod. Only the checkpoint's tensors tell how long they are."""
        return WEIGHT in facts and super().is_packed(info, source, facts, spec)

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: BitsAndBytesSpec) -> Storage:
        """See StoredMethod."""
        from jackfield_quantization.bitsandbytes_storage import FourBitStorage, eight_bits

        return eight_bits() if facts[WEIGHT].dtype == "int8" else FourBitStorage()
