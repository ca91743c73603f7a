"""``gptq``: GPTQ checkpoints of 2, 3, 4 and 8 bits, as AutoGPTQ, GPTQModel and AutoRound write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.matching import compiled_source, integer, named, names_in, wrong
from jackfield_quantization.stored_method import StoredMethod

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

BITS = (2, 3, 4, 8)
MARLIN = "marlin"
FORMATS = ("gptq", "gptq_v2", MARLIN)
QWEIGHT = "qweight"
OLD_NAMES = frozenset({"B", "s"})
"""What the first checkpoints of Marlin's have."""


@dataclass(frozen=True, slots=True)
class GptqSpec:
    """How matrices are packed.

    Args:
        bits: of a number. group: inputs that share scale and zero, or 0 for all. reordered: groups are of inputs in
            another order (``desc_act``), which ``g_idx`` tells. zeros_plus: what is added to stored zero points.
        dynamic: rules for modules: (regular expression, changes to the spec, or None to leave the module alone).
        ignored: modules that are plain. marlin: whether matrices are in the order of Marlin's kernel.
    """

    bits: int = 4
    group: int = 128
    reordered: bool = False
    zeros_plus: int = 1
    dynamic: tuple[tuple[str, Mapping[str, Any] | None], ...] = ()
    ignored: tuple[str, ...] = ()
    marlin: bool = False

    def of(self, module: str) -> GptqSpec | None:
        """Return the spec of one module, or None where the rules leave it alone."""
        for pattern, changes in self.dynamic:
            if re.match(pattern, module):
                return None if changes is None else replace(self, **changes)
        return self


class Gptq(StoredMethod):
    """GPTQ, dequantized at load."""

    name: ClassVar[str] = "gptq"
    summary: ClassVar[str] = "GPTQ of 2, 3, 4 and 8 bits, dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"gptq", "gptq_marlin", "auto_gptq", "gptq_v2", "gptq_bitblas"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> GptqSpec:
        """Return the spec.

        Raises:
            ConfigError: a value is not known.
        """
        version = config.get("checkpoint_format") or config.get("format") or "gptq"
        if config.get("quant_method") == "gptq_v2":
            version = "gptq_v2"
        if config.get("is_marlin_format"):
            version = MARLIN
        if version not in FORMATS:
            raise wrong("checkpoint_format", version, f"one of {', '.join(FORMATS)}")
        if str(config.get("pack_dtype") or "int32") != "int32":
            raise wrong("pack_dtype", config["pack_dtype"], "int32")
        return GptqSpec(
            bits=integer(config, "bits", 4, (4,) if version == MARLIN else BITS),
            group=group_of(config, "group_size", 128),
            reordered=bool(config.get("desc_act", False)),
            zeros_plus=1 if version == "gptq" else 0,
            dynamic=_dynamic(config.get("dynamic")),
            ignored=names_in(config, "modules_to_not_convert"),
            marlin=version == MARLIN,
        )

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: GptqSpec) -> bool:
        """See StoredMethod."""
        return named(source, spec.ignored) or spec.of(source) is None

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return QWEIGHT in facts or facts.keys() >= OLD_NAMES

    @classmethod
    def experts_layout(cls, spec: GptqSpec) -> str:
        """Return the layout of experts; rules may make some dense."""
        specs = [spec, *(replace(spec, **changes) for _, changes in spec.dynamic if changes is not None)]
        return "int4" if any(one.bits == 4 and not one.reordered for one in specs) else "dense"

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: GptqSpec) -> Storage:
        """See StoredMethod."""
        own = spec.of(source) or spec
        if own.marlin:
            from jackfield_quantization.awq_layouts import MARLIN_NAMES, MarlinStorage

            return MarlinStorage(own.group, MARLIN_NAMES) if facts.keys() >= OLD_NAMES else MarlinStorage(own.group)
        from jackfield_quantization.gptq_storage import GptqStorage

        return GptqStorage(own)


def group_of(config: Mapping[str, object], key: str, default: int) -> int:
    """Return inputs of a group, 0 standing for all.

    Raises:
        ConfigError: it is no number that a group can have.
    """
    group = integer(config, key, default)
    if group < -1:
        raise wrong(key, group, "-1 or a positive number")
    return max(group, 0)


def _dynamic(rules: object) -> tuple[tuple[str, Mapping[str, Any] | None], ...]:
    """Return rules for modules. GPTQModel: ``+:`` (or nothing) before a regular expression changes what it matches,
    ``-:`` leaves it alone; the first match counts.
    """
    if not rules:
        return ()
    if not isinstance(rules, Mapping):
        raise wrong("dynamic", rules, "a mapping of regular expressions")
    found: list[tuple[str, Mapping[str, Any] | None]] = []
    for key, value in rules.items():
        expression = key.removeprefix("+:").removeprefix("-:")
        compiled_source(expression)
        found.append((expression, None if key.startswith("-:") else _changes(value)))
    return tuple(found)


def _changes(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong("dynamic", value, "a mapping of regular expressions to settings")
    changes: dict[str, Any] = {}
    if "bits" in value:
        changes["bits"] = integer(value, "bits", 4, BITS)
    if "group_size" in value:
        changes["group"] = group_of(value, "group_size", 128)
    if "desc_act" in value:
        changes["reordered"] = bool(value["desc_act"])
    return changes
