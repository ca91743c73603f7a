"""``auto_round``: checkpoints of AutoRound and Intel Neural Compressor in the layouts of GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.gptq import BITS, QWEIGHT, GptqSpec, group_of
from jackfield_quantization.matching import integer, named, names_in, wrong
from jackfield_quantization.stored_method import StoredMethod

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

PACKINGS: Mapping[str, int | None] = {
    "auto_round": 0,
    "auto_round:gptq": 1,
    "auto_round:auto_gptq": 1,
    "auto_round:awq": None,
    "auto_round:auto_awq": None,
}
"""What stored zero points are less by, in GPTQ's layout; None for AWQ's."""
WIDE = 16
"""Bits from which on a module is plain."""


@dataclass(frozen=True, slots=True)
class AutoRoundSpec:
    """How matrices are packed.

    Args:
        common: of all modules, in GPTQ's layout. awq: whether they are in AWQ's. extra: changes by module, or None
            where a module is plain. ignored: modules that are plain.
    """

    common: GptqSpec = field(default_factory=GptqSpec)
    awq: bool = False
    extra: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


class AutoRound(StoredMethod):
    """AutoRound in the layouts of GPTQ and AWQ, dequantized at load."""

    name: ClassVar[str] = "auto_round"
    summary: ClassVar[str] = "AutoRound and INC checkpoints in GPTQ's and AWQ's layouts, dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"auto-round", "auto_round", "autoround", "intel/auto-round", "inc"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> AutoRoundSpec:
        """Return the spec.

        Raises:
            ConfigError: a value is not known.
        """
        packing = str(config.get("packing_format") or "auto_round:gptq")
        if packing not in PACKINGS:
            raise wrong("packing_format", packing, f"one of {', '.join(PACKINGS)}")
        plus = PACKINGS[packing]
        common = GptqSpec(
            bits=integer(config, "bits", 4, (4,) if plus is None else BITS),
            group=group_of(config, "group_size", 128),
            zeros_plus=plus or 0,
        )
        extra = config.get("extra_config") or {}
        if not isinstance(extra, Mapping):
            raise wrong("extra_config", extra, "a mapping of modules to settings")
        changes = {name: _changes(value) for name, value in extra.items()}
        return AutoRoundSpec(common, plus is None, changes, names_in(config, "modules_to_not_convert"))

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: AutoRoundSpec) -> bool:
        """See StoredMethod."""
        return named(source, spec.ignored) or _of(spec, source) is None

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return QWEIGHT in facts

    @classmethod
    def experts_layout(cls, spec: AutoRoundSpec) -> str:
        """Return the layout of experts; some may be dense."""
        common = spec.common.bits
        bits = {common, *(changes.get("bits", common) for changes in spec.extra.values() if changes)}
        return "int4" if 4 in bits else "dense"

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: AutoRoundSpec) -> Storage:
        """See StoredMethod."""
        from jackfield_quantization.gptq_storage import AwqStorage, GptqStorage

        own = _of(spec, source) or spec.common
        return AwqStorage(own.group) if spec.awq else GptqStorage(own)


def _of(spec: AutoRoundSpec, source: str) -> GptqSpec | None:
    """Return how one module is packed, or None where it is plain."""
    for name, changes in spec.extra.items():
        if named(source, (name,)):
            return None if changes is None else replace(spec.common, **changes)
    return spec.common


def _changes(value: object) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping):
        raise wrong("extra_config", value, "a mapping of modules to settings")
    bits = integer(value, "bits", 4)
    if bits >= WIDE:
        return None
    changes: dict[str, Any] = {}
    if "bits" in value:
        changes["bits"] = integer(value, "bits", 4, BITS)
    if "group_size" in value:
        changes["group"] = group_of(value, "group_size", 128)
    return changes
