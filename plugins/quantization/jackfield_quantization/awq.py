"""``awq``: AWQ checkpoints in all orders that AutoAWQ writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.gptq import QWEIGHT, group_of
from jackfield_quantization.matching import integer, named, names_in, wrong
from jackfield_quantization.stored_method import StoredMethod

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage


VERSIONS = {name: name for name in ("gemm", "gemv", "gemv_fast", "marlin")} | {"exllama": "gemm", "ipex": "gemm"}
"""Orders of numbers; some kernels have none of their own."""


@dataclass(frozen=True, slots=True)
class AwqSpec:
    """How matrices are packed.

    Args:
        group: inputs that share scale and zero, or 0 for all. zeros: whether there are zero points. ignored: modules
            that are plain. version: the order of numbers.
    """

    group: int = 128
    zeros: bool = True
    ignored: tuple[str, ...] = ()
    version: str = "gemm"


class Awq(StoredMethod):
    """AWQ of four bits, dequantized at load."""

    name: ClassVar[str] = "awq"
    summary: ClassVar[str] = "AWQ of 4 bits, dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"awq", "awq_marlin", "auto_awq"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> AwqSpec:
        """Return the spec.

        Raises:
            ConfigError: a value is not known.
        """
        key = next((key for key in ("version", "checkpoint_format", "format") if config.get(key)), "version")
        version = str(config.get(key) or "gemm").lower()
        if version not in VERSIONS:
            raise wrong(key, version, f"one of {', '.join(sorted(VERSIONS))}")
        integer(config, "bits" if "bits" in config else "w_bit", 4, (4,))
        return AwqSpec(
            group_of(config, "group_size" if "group_size" in config else "q_group_size", 128),
            bool(config.get("zero_point", True)),
            names_in(config, "modules_to_not_convert"),
            VERSIONS[version],
        )

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: AwqSpec) -> bool:
        """See StoredMethod."""
        return named(source, spec.ignored)

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return QWEIGHT in facts

    @classmethod
    def experts_layout(cls, spec: AwqSpec) -> str:
        """Return the layout of experts."""
        return "dense" if spec.version == "gemv_fast" else "int4"

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: AwqSpec) -> Storage:
        """See StoredMethod."""
        if spec.version == "gemm":
            from jackfield_quantization.gptq_storage import AwqStorage

            return AwqStorage(spec.group, zeros=spec.zeros)
        from jackfield_quantization.awq_layouts import AwqFastStorage, AwqRowsStorage, MarlinStorage

        storages = {"gemv": AwqRowsStorage, "gemv_fast": AwqFastStorage, "marlin": MarlinStorage}
        return storages[spec.version](spec.group)
