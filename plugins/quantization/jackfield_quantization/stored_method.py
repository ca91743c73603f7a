"""What methods that dequantize checkpoints at load have in common. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    Band,
    CacheScheme,
    LayerInfo,
    LinearScheme,
    Preference,
    QuantizationMethod,
    QuantizationRequest,
    Reason,
    TensorFacts,
)
from jackfield_quantization.matching import sources_of
from jackfield_quantization.unquantized import no_online_conversion

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage


WEIGHT = "weight"
PLAIN = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Types of weights that are not quantized."""


class StoredMethod(QuantizationMethod):
    """Base: asks, matrix by matrix, how it is stored."""

    # Products are those of the method for plain layers, which is asked for the same.
    features: ClassVar[frozenset[str]] = frozenset({"linear", "embedding", "head", "experts", "batch_invariant"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16"})
    api: ClassVar[tuple[int, int]] = (1, 3)

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Return why the checkpoint cannot be read."""
        return no_online_conversion(cls.name, request)

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return FALLBACK: right, but as large in memory as a dense checkpoint."""
        return Preference(Band.FALLBACK, "weights are dequantized at load")

    @classmethod
    def cache_scheme(cls, spec: Any) -> CacheScheme | None:
        """Return the names of scales of the cache, which checkpoints have whether they say so or not. Some tools call
        them scales of what the projections of keys and values give.
        """
        names = {name: f"{name}_scale" for name in ("q", "k", "v", "kv", "prob")}
        return CacheScheme("", names, {f"{part}_proj.output_scale": part for part in ("k", "v")})

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme | None:
        """Return the scheme of a layer, or None where all its matrices are plain."""
        storages = cls.storages(info, spec)
        if storages is None:
            return None
        if info.role == "experts":
            from jackfield_quantization.stored_experts import experts_scheme

            return experts_scheme(info, storages)
        from jackfield_quantization.stored import DecodedScheme

        return DecodedScheme(storages)

    @classmethod
    def storages(cls, info: LayerInfo, spec: Any) -> dict[str, Storage] | None:
        """Return how each matrix of a layer is stored, by shard, or None where all are plain."""
        found: dict[str, Storage | None] = {}
        for shard, source in sources_of(info).items():
            facts = info.tensors.get(shard, {})
            packed = cls.is_packed(info, source, facts, spec)
            if not packed:
                refuse_narrow(info, source, facts)
            found[shard] = cls.storage(info, source, facts, spec) if packed else None
        if not any(found.values()):
            return None
        from jackfield_quantization.stored import PlainStorage

        return {shard: storage or PlainStorage() for shard, storage in found.items()}

    @classmethod
    def is_packed(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: Any) -> bool:
        """Return whether a matrix is quantized: the configuration must not leave it alone, and the checkpoint must
        have it so. Where its tensors are not known, linear layers and experts are.
        """
        if cls.left_alone(info, source, spec):
            return False
        if not facts:
            return info.role in ("linear", "experts")
        return cls.looks_packed(facts) or is_narrow(facts)

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: Any) -> bool:
        """Return whether the configuration says that a checkpoint module is not quantized."""
        raise NotImplementedError

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """Return whether a module's tensors are those of a quantized one."""
        raise NotImplementedError

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: Any) -> Storage:
        """Return how a quantized matrix is stored.

        Raises:
            CheckpointError: in a way that cannot be read.
        """
        raise NotImplementedError


def is_narrow(facts: Mapping[str, TensorFacts]) -> bool:
    """Return whether a module's weight is in a type that no computation is done in: it means nothing without scales."""
    return WEIGHT in facts and facts[WEIGHT].dtype not in PLAIN


def refuse_narrow(info: LayerInfo, source: str, facts: Mapping[str, TensorFacts]) -> None:
    """Refuse a weight in a narrow type that the configuration leaves alone.

    Raises:
        CheckpointError: it is one.
    """
    if is_narrow(facts):
        detail = f"its weight is stored as {facts[WEIGHT].dtype}, but the configuration leaves it alone"
        raise unreadable(info, source, detail, "correct quantization_config in config.json")


def unreadable(info: LayerInfo, source: str, detail: str, remedy: str = "") -> CheckpointError:
    """Return the error about a matrix that is stored in a way that nothing here reads."""
    return CheckpointError(
        f"{source} (layer {info.name}): {detail}",
        field="quantization_config",
        value=source,
        remedy=remedy or "quantize the model in a form that 'docs/plugins/quantization.md' lists",
    )
