"""``modelopt``: checkpoints of TensorRT Model Optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.matching import named, names_in, wrong
from jackfield_quantization.stored_method import StoredMethod, unreadable

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "NVFP4_AWQ",
    "W4A8_NVFP4_FP8",
    "MXFP8",
    "W4A8_MXFP4_FP8",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A16",
    "W8A8_SQ_PER_CHANNEL",
)
MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class ModeloptSpec:
    """What was done.

    Args:
        algorithm: to all modules, or ``""``. ignored: modules that are plain. layers: algorithms by module, in mixed
            checkpoints.
    """

    algorithm: str = ""
    ignored: tuple[str, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)

    def of(self, source: str) -> str:
        """Return the algorithm of one module, or ``""``."""
        if self.algorithm:
            return self.algorithm
        return next((algorithm for name, algorithm in self.layers.items() if named(source, (name,))), "")


class Modelopt(StoredMethod):
    """Floats of 8 and of 4 bits, whole numbers of 8 and of 4, dequantized at load. Activations are not quantized."""

    name: ClassVar[str] = "modelopt"
    summary: ClassVar[str] = "ModelOpt checkpoints (FP8, NVFP4, MXFP8, int8, int4, mixed), dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> ModeloptSpec:
        """Return the spec.

        Raises:
            ConfigError: a value is not known.
        """
        nested = config.get("quantization")
        config = nested if isinstance(nested, Mapping) else config
        algorithm = str(config.get("quant_algo") or "").upper()
        ignored = names_in(config, "exclude_modules", "ignore", "modules_to_not_convert")
        if algorithm != MIXED:
            return ModeloptSpec(_known("quant_algo", algorithm), ignored)
        layers = config.get("quantized_layers")
        if not isinstance(layers, Mapping):
            raise wrong("quantized_layers", layers, "a mapping of modules to their quantization")
        found = {name: _layer_algorithm(name, entry) for name, entry in layers.items()}
        return ModeloptSpec("", ignored, found)

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: ModeloptSpec) -> bool:
        """See StoredMethod."""
        return named(source, spec.ignored) or not spec.of(source)

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return "weight_scale" in facts

    @classmethod
    def experts_layout(cls, spec: ModeloptSpec) -> str:
        """Return the layout of experts; some may be dense."""
        names = {spec.algorithm, *spec.layers.values()}
        if any("FP8" in name and "FP4" not in name for name in names):
            return "fp8"
        return "mxfp4" if any("MXFP4" in name for name in names) else "dense"

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: ModeloptSpec) -> Storage:
        """See StoredMethod."""
        from jackfield_quantization.modelopt_storage import storage_of

        made = storage_of(spec.of(source), facts, info.input_size)
        if made is None:
            raise unreadable(info, source, f"its scales are no whole groups of {info.input_size} inputs")
        return made


def _known(key: str, algorithm: str) -> str:
    if algorithm not in ALGORITHMS:
        raise wrong(key, algorithm, f"one of {', '.join((*ALGORITHMS, MIXED))}")
    return algorithm


def _layer_algorithm(name: str, entry: object) -> str:
    algorithm = entry.get("quant_algo") if isinstance(entry, Mapping) else entry
    return _known(f"quantized_layers.{name}.quant_algo", str(algorithm or "").upper())
