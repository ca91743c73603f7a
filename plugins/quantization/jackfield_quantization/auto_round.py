"""``auto_round``: checkpoints of AutoRound and Intel Neural Compressor: whole numbers in the layouts of GPTQ and AWQ,
and floats of eight and four bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.compressed_tensors import WeightArgs
from jackfield_quantization.fp8_checkpoint import block_of
from jackfield_quantization.gptq import BITS, QWEIGHT, GptqSpec, group_of
from jackfield_quantization.matching import REGEX, compiled_source, integer, named, names_in, wrong
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
FLOATS = tuple(
    f"auto_round:{word}"
    for word in ("fp8", "fp8_static", "mx_fp", "mx_fp_rceil", "nv_fp", "nv_fp4_with_static_gs", "llm_compressor")
)
"""Packings of floats; ``data_type`` says which."""
EXPRESSION = frozenset("*+?^$()[]{}|\\")
"""Letters of which a name of several modules has one."""
WIDE = 16
"""Bits from which on a module is plain."""


@dataclass(frozen=True, slots=True)
class AutoRoundSpec:
    """How matrices are packed.

    Args:
        common: of all modules. awq: whether whole numbers are in AWQ's layout and not in GPTQ's. extra: how single
            modules are packed, or None where they are plain. ignored: modules that are plain.
    """

    common: GptqSpec | WeightArgs = field(default_factory=GptqSpec)
    awq: bool = False
    extra: Mapping[str, GptqSpec | WeightArgs | None] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def of(self, source: str) -> GptqSpec | WeightArgs | None:
        """Return how one module is packed, or None where it is plain."""
        return next((own for name, own in self.extra.items() if _means(name, source)), self.common)


class AutoRound(StoredMethod):
    """AutoRound, dequantized at load. Activations are not quantized."""

    name: ClassVar[str] = "auto_round"
    summary: ClassVar[str] = "AutoRound and INC checkpoints (GPTQ's and AWQ's layouts, fp8, MX, NVFP4)"
    kinds: ClassVar[frozenset[str]] = frozenset({"auto-round", "auto_round", "autoround", "intel/auto-round", "inc"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> AutoRoundSpec:
        """Return the spec.

        Raises:
            ConfigError: a value is not known.
        """
        packing = str(config.get("packing_format") or "auto_round:gptq")
        if packing not in PACKINGS and packing not in FLOATS:
            raise wrong("packing_format", packing, f"one of {', '.join((*PACKINGS, *FLOATS))}")
        extra = config.get("extra_config") or {}
        if not isinstance(extra, Mapping):
            raise wrong("extra_config", extra, "a mapping of modules to settings")
        for name in filter(_is_expression, extra):
            compiled_source(name)
        ignored = names_in(config, "modules_to_not_convert")
        if packing in FLOATS:
            floats = {name: _own_float(config, value) for name, value in extra.items()}
            return AutoRoundSpec(_float(config), False, floats, ignored)
        plus = PACKINGS[packing]
        common = GptqSpec(
            bits=integer(config, "bits", 4, (4,) if plus is None else BITS),
            group=group_of(config, "group_size", 128),
            zeros_plus=plus or 0,
        )
        return AutoRoundSpec(common, plus is None, {n: _own(common, value) for n, value in extra.items()}, ignored)

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: AutoRoundSpec) -> bool:
        """See StoredMethod."""
        return named(source, spec.ignored) or spec.of(source) is None

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return QWEIGHT in facts or "weight_packed" in facts or "weight_scale" in facts or "weight_scale_inv" in facts

    @classmethod
    def experts_layout(cls, spec: AutoRoundSpec) -> str:
        """Return the layout of experts; some may be dense."""
        for own in (spec.common, *spec.extra.values()):
            if isinstance(own, WeightArgs):
                return {8: "fp8", 4: "dense" if own.strategy == "tensor_group" else "mxfp4"}[own.bits]
            if own is not None and own.bits == 4:
                return "int4"
        return "dense"

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: AutoRoundSpec) -> Storage:
        """See StoredMethod."""
        own = spec.of(source)
        assert own is not None, "asked only for modules that are quantized"
        if isinstance(own, GptqSpec):
            from jackfield_quantization.gptq_storage import AwqStorage, GptqStorage

            return AwqStorage(own.group) if spec.awq else GptqStorage(own)
        if own.bits == 8 and not own.group:
            from jackfield_quantization.fp8_storage import fp8_storage

            return fp8_storage(own.block)
        from jackfield_quantization.compressed_storage import storage_of

        made = storage_of(own, "")
        assert made is not None, "no other floats are known"
        return made


def _means(name: str, source: str) -> bool:
    """Return whether an entry of ``extra_config`` means a module: by its name, or as a regular expression."""
    if name == source:
        return True
    if _is_expression(name):
        return re.search(compiled_source(name), source) is not None
    return named(source, (name,))


def _is_expression(name: str) -> bool:
    """Return whether a name is a regular expression, as AutoRound writes them: without ``re:`` before it."""
    return bool(EXPRESSION & set(name)) and not name.startswith(REGEX)


def _own(common: GptqSpec, value: object) -> GptqSpec | None:
    """Return how a module is packed that has settings of its own, or None where it is plain."""
    if _bits(value) >= WIDE:
        return None
    assert isinstance(value, Mapping), "else it has no bits"
    changes: dict[str, Any] = {}
    if "bits" in value:
        changes["bits"] = integer(value, "bits", 4, BITS)
    if "group_size" in value:
        changes["group"] = group_of(value, "group_size", 128)
    return replace(common, **changes)


def _own_float(config: Mapping[str, object], value: object) -> WeightArgs | None:
    """Return the same for floats."""
    if _bits(value) >= WIDE:
        return None
    assert isinstance(value, Mapping), "else it has no bits"
    return _float({**config, **value})


def _bits(value: object) -> int:
    if not isinstance(value, Mapping):
        raise wrong("extra_config", value, "a mapping of modules to settings")
    return integer(value, "bits", 4)


def _float(config: Mapping[str, object]) -> WeightArgs:
    """Return how floats of a ``data_type`` are stored, in the words of compressed-tensors, whose names they have."""
    kind, size = str(config.get("data_type", "")).lower(), config.get("group_size")
    if "mx_fp" in kind:
        return WeightArgs("float", integer(config, "bits", 4, (4, 8)), "group", 32)
    if "nv_fp" in kind:
        return WeightArgs("float", integer(config, "bits", 4, (4,)), "tensor_group", 16)
    if not kind.startswith("fp"):
        raise wrong("data_type", kind, "mx_fp, nv_fp or fp8, as the packing says")
    block = block_of(size) if isinstance(size, list | tuple) else None
    return WeightArgs("float", integer(config, "bits", 8, (8,)), "block" if block else "channel", block=block)
