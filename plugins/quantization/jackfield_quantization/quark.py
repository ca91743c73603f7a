"""``quark``: checkpoints of AMD's quantizer, in the forms that store numbers outputs first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.matching import named, names_in, wrong
from jackfield_quantization.stored_method import StoredMethod, unreadable

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

SUPPORTED = "fp8_e4m3 and int8 (per_tensor, per_channel) and fp4 (per_group of 32, scales in e8m0)"


@dataclass(frozen=True, slots=True)
class QuarkWeight:
    """How weights are quantized, in Quark's words."""

    dtype: str
    scheme: str
    group: int = 0

    def __str__(self) -> str:
        return f"{self.dtype}, {self.scheme}" + (f" of {self.group}" if self.group else "")


@dataclass(frozen=True, slots=True)
class QuarkSpec:
    """What all modules are in, or None; by module where they differ; and what is left alone."""

    common: QuarkWeight | None
    layers: Mapping[str, QuarkWeight | None] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def of(self, source: str) -> QuarkWeight | None:
        """Return what one module is in."""
        return next((weight for name, weight in self.layers.items() if named(source, (name,))), self.common)


class Quark(StoredMethod):
    """8-bit floats, int8 and MXFP4, dequantized at load. Activations are not quantized."""

    name: ClassVar[str] = "quark"
    summary: ClassVar[str] = "Quark checkpoints (fp8, int8, mxfp4), dequantized at load"
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
            _weight("global_quant_config", config.get("global_quant_config")), made, names_in(config, "exclude")
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
        return "fp8" if "fp8_e4m3" in found else "mxfp4" if "fp4" in found else "dense"

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: QuarkSpec) -> Storage:
        """See StoredMethod."""
        from jackfield_quantization.scaled import Grid, Nibbles, ScaledStorage, Typed

        weight = spec.of(source)
        assert weight is not None, "asked only for modules that are quantized"
        if weight.dtype in ("fp8_e4m3", "int8") and weight.scheme in ("per_tensor", "per_channel"):
            dtype = "int8" if weight.dtype == "int8" else "float8_e4m3fn"
            return ScaledStorage(Typed(dtype), Grid(("weight_scale",)))
        if weight.dtype == "fp4" and weight.scheme == "per_group" and weight.group == 32:
            return ScaledStorage(Nibbles("weight"), Grid(("weight_scale",), 1, weight.group, "uint8"))
        raise unreadable(info, source, f"nothing reads {weight}", f"what is read: {SUPPORTED}")


def _weight(key: str, value: object) -> QuarkWeight | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong(key, value, "a mapping")
    weight: Any = value.get("weight")
    if weight is None:
        return None
    if isinstance(weight, list):
        raise wrong(f"{key}.weight", weight, "quantized in one step")
    if weight.get("dtype") == "int8" and not weight.get("symmetric", True):
        raise wrong(f"{key}.weight.symmetric", False, "true for int8")
    return QuarkWeight(str(weight.get("dtype")), str(weight.get("qscheme")), int(weight.get("group_size") or 0))
