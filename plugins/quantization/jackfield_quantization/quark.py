"""``quark``: checkpoints of AMD's quantizer, in the forms that store numbers outputs first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.fp8_checkpoint import block_of
from jackfield_quantization.matching import named, names_in, wrong
from jackfield_quantization.stored_method import StoredMethod, unreadable

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

SUPPORTED = (
    "fp8_e4m3 and fp8_e5m2 (per_tensor, per_channel, per_group, per_block), int8 (per_tensor, per_channel; symmetric), "
    "int4 and uint4 (per_group), fp4, fp6_e2m3 and fp6_e3m2 (per_group of 32, scales in e8m0), fp4 with scales in fp8 "
    "(per_group of 16)"
)
FLOATS: Mapping[str, str] = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Quark's words for types that torch has, and torch's."""
LAYOUTS: Mapping[str, str] = {"fp8_e4m3": "fp8", "fp4": "mxfp4", "int4": "int4", "uint4": "int4"}
"""Layouts that experts may be in."""
WHOLE = ("per_tensor", "per_channel")
NVFP4, NVFP4_GROUP = "nvfp4", 16
"""Four-bit floats whose scales are 8-bit floats with one scale for all of them; and numbers that share a scale."""
NAMES = ("weight", "weight_zero_point", "weight_scale")


@dataclass(frozen=True, slots=True)
class QuarkWeight:
    """How weights are quantized, in Quark's words."""

    dtype: str
    scheme: str
    group: int = 0
    block: tuple[int, int] | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        size = self.group or self.block
        return f"{self.dtype}, {self.scheme}" + (f" of {size}" if size else "")


@dataclass(frozen=True, slots=True)
class QuarkSpec:
    """What all modules are in, or None; by module where they differ; what is left alone; and whether numbers of a word
    are out of order.
    """

    common: QuarkWeight | None
    layers: Mapping[str, QuarkWeight | None] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    reordered: bool = True

    def of(self, source: str) -> QuarkWeight | None:
        """Return what one module is in."""
        return next((weight for name, weight in self.layers.items() if named(source, (name,))), self.common)


class Quark(StoredMethod):
    """Floats of 8, 6 and 4 bits and whole numbers of 8 and 4, dequantized at load. Activations are not quantized."""

    name: ClassVar[str] = "quark"
    summary: ClassVar[str] = "Quark checkpoints (fp8, int8, int4, mxfp4, mxfp6), dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"quark"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> QuarkSpec:
        """Return the spec.

        Raises:
            ConfigError: a value is not known.
        """
        layers = config.get("layer_quant_config") or {}
        if not isinstance(layers, Mapping):
            raise wrong("layer_quant_config", layers, "a mapping of modules to settings")
        if config.get("layer_type_quant_config"):
            raise wrong("layer_type_quant_config", config["layer_type_quant_config"], "empty")
        made = {name: _weight(f"layer_quant_config.{name}", value) for name, value in layers.items()}
        return QuarkSpec(
            _weight("global_quant_config", config.get("global_quant_config")),
            made,
            names_in(config, "exclude"),
            _pack_method(config) == "reorder",
        )

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: QuarkSpec) -> bool:
        """See StoredMethod."""
        return named(source, spec.ignored) or spec.of(source) is None

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return "weight_scale" in facts

    @classmethod
    def experts_layout(cls, spec: QuarkSpec) -> str:
        """Return the layout of experts; some may be dense."""
        found = {weight.dtype for weight in (spec.common, *spec.layers.values()) if weight is not None}
        return next((layout for dtype, layout in LAYOUTS.items() if dtype in found), "dense")

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: QuarkSpec) -> Storage:
        """See StoredMethod."""
        weight = spec.of(source)
        assert weight is not None, "asked only for modules that are quantized"
        if weight.dtype in ("int4", "uint4") and weight.scheme == "per_group" and weight.group:
            from jackfield_quantization.gptq_storage import AwqStorage
            from jackfield_quantization.packing import AWQ_ORDER

            order = AWQ_ORDER if spec.reordered else ()
            signed = weight.dtype == "int4"
            zeros = not signed or not weight.symmetric
            return AwqStorage(weight.group, zeros=zeros, names=NAMES, order=order, signed=signed)
        made = cls._scaled(weight)
        if made is None:
            raise unreadable(info, source, f"nothing reads {weight}", f"what is read: {SUPPORTED}")
        return made

    @classmethod
    def _scaled(cls, weight: QuarkWeight) -> Storage | None:
        from jackfield_quantization.packing import E2M3, E3M2
        from jackfield_quantization.scaled import Grid, Nibbles, Numbers, ScaledStorage, Sixes, Typed

        numbers: Numbers
        if weight.dtype in FLOATS:
            rows, columns = weight.block or (1, weight.group)
            return ScaledStorage(Typed(FLOATS[weight.dtype]), Grid(("weight_scale",), rows, columns))
        if weight.dtype == NVFP4:
            scale = Grid(("weight_scale",), 1, weight.group, "float8_e4m3fn")
            return ScaledStorage(Nibbles("weight"), scale, factor="weight_scale_2", unused=("input_scale_2",))
        if weight.dtype == "int8" and weight.scheme in WHOLE:
            return ScaledStorage(Typed("int8"), Grid(("weight_scale",)))
        if weight.dtype not in ("fp4", "fp6_e2m3", "fp6_e3m2") or weight.scheme != "per_group" or weight.group != 32:
            return None
        if weight.dtype == "fp4":
            numbers = Nibbles("weight")
        else:
            numbers = Sixes("weight", E2M3 if weight.dtype == "fp6_e2m3" else E3M2)
        return ScaledStorage(numbers, Grid(("weight_scale",), 1, weight.group, "uint8"))


def _pack_method(config: Mapping[str, object]) -> str:
    """Return how numbers of a word are ordered: ``reorder``, which is the default, or ``order``."""
    export = config.get("export")
    stated = export.get("pack_method") if isinstance(export, Mapping) else config.get("pack_method")
    word = str(stated or "reorder")
    if word not in ("reorder", "order"):
        raise wrong("export.pack_method", word, "one of order, reorder")
    return word


def _weight(key: str, value: object) -> QuarkWeight | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong(key, value, "a mapping")
    weight: Any = value.get("weight")
    if weight is None:
        return None
    if isinstance(weight, list):
        if _is_nvfp4(weight):
            return QuarkWeight(NVFP4, "per_group", NVFP4_GROUP)
        raise wrong(f"{key}.weight", weight, "quantized in one step, or in fp4 whose scales are fp8_e4m3")
    if weight.get("dtype") == "int8" and not weight.get("symmetric", True):
        raise wrong(f"{key}.weight.symmetric", False, "true for int8")
    scheme, size = str(weight.get("qscheme")), int(weight.get("group_size") or 0)
    block = block_of(weight.get("block_size")) if scheme == "per_block" else None
    group, symmetric = size if scheme == "per_group" else 0, bool(weight.get("symmetric", True))
    return QuarkWeight(str(weight.get("dtype")), scheme, group, block, symmetric)


def _is_nvfp4(steps: list[Any]) -> bool:
    """Return whether weights are four-bit floats, and their scales 8-bit floats with one scale."""
    if len(steps) != 2 or not all(isinstance(step, Mapping) for step in steps):
        return False
    numbers, scales = steps
    four = (numbers.get("dtype"), numbers.get("qscheme"), numbers.get("group_size"))
    eight = (scales.get("dtype"), scales.get("qscheme"))
    return four == ("fp4", "per_group", NVFP4_GROUP) and eight == ("fp8_e4m3", "per_tensor")
