"""``hqq``: checkpoints of half-quadratic quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.matching import wrong
from jackfield_quantization.stored_method import StoredMethod

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

PACKED = "W_q"
NESTED = ("scale_quant_params", "zero_quant_params")


class Hqq(StoredMethod):
    """HQQ of 1, 2, 3, 4 and 8 bits, dequantized at load. Each module says of itself how it is stored."""

    name: ClassVar[str] = "hqq"
    summary: ClassVar[str] = "HQQ of 1, 2, 3, 4 and 8 bits, dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"hqq"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> None:
        """Refuse scales that are quantized themselves; all else the tensors say.

        Raises:
            ConfigError: they are.
        """
        stated = config.get("quant_config")
        if not isinstance(stated, Mapping):
            return
        for key in NESTED:
            if stated.get(key):
                raise wrong(f"quant_config.{key}", stated[key], "absent: scales and zero points must be plain")

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: Any) -> bool:
        """See StoredMethod."""
        return False

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return PACKED in facts

    @classmethod
    def is_packed(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: Any) -> bool:
        """See StoredMethod. Only the checkpoint's tensors tell how long they are."""
        return cls.looks_packed(facts)

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: Any) -> Storage:
        """See StoredMethod."""
        from jackfield_quantization.hqq_storage import HqqStorage

        return HqqStorage()
