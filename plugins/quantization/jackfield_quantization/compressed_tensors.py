"""``compressed_tensors``: checkpoints of llm-compressor, of weights that are dense, packed in blocks, or sparse by a
mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jackfield.errors import ConfigError
from jackfield.interfaces import LayerInfo, SharedTensors, TensorFacts
from jackfield_quantization.compressed_rotations import OUTPUT, Rotation, rotations_of, stored_rotations
from jackfield_quantization.fp8_checkpoint import block_of
from jackfield_quantization.matching import REGEX, named, names_in, wrong
from jackfield_quantization.stored_method import StoredMethod, refuse_narrow, unreadable

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

CLASSES = {"linear": "Linear", "experts": "Linear", "head": "Linear", "embedding": "Embedding"}
"""What torch calls the modules of our roles."""
FORMATS = frozenset(
    {
        "dense",
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp6-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    }
)
STRATEGIES = frozenset({"tensor", "channel", "group", "tensor_group", "block"})
PACKED_LAYOUTS = {("int", 4): "int4", ("float", 8): "fp8", ("float", 4): "mxfp4"}
"""Layouts that experts may be in, by kind and bits. All backends that take one of them take dense experts too."""
ZERO = "weight_zero_point"
MASK = "bitmask"
"""A tensor that tells where a sparse weight is not 0."""
SPARSE = frozenset({"dense", "sparse-24-bitmask"})
SUPPORTED = (
    "int of 2 to 8 bits (tensor, channel, group; symmetric or not), float of 8 bits (tensor, channel, group, block), "
    "of 4 bits (groups of 16 with a global scale, or of 32) and of 6 bits (groups of 32)"
)


@dataclass(frozen=True, slots=True)
class WeightArgs:
    """How the matrices of one group are quantized: words of compressed-tensors' ``QuantizationArgs``."""

    kind: str
    bits: int
    strategy: str
    group: int = 0
    block: tuple[int, int] | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        size = f" of {self.group}" if self.group else f" of {self.block}" if self.block else ""
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.kind} of {self.bits} bits, strategy {self.strategy}{size}, {symmetry}"


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that are quantized alike: names, regular expressions behind ``re:`` or classes; ``weights`` is None where
    only activations are quantized.
    """

    targets: tuple[str, ...]
    weights: WeightArgs | None
    format: str


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """All groups, what is left alone, and what is rotated."""

    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    rotations: tuple[Rotation, ...] = ()

    def rotations_of(self, info: LayerInfo, source: str) -> tuple[Rotation, ...]:
        """Return the rotations around a module's weight."""
        kind = CLASSES.get(info.role, "Linear")
        return tuple(rotation for rotation in self.rotations if rotation.takes(source, kind))

    def group_of(self, info: LayerInfo, source: str) -> Group | None:
        """Return the group that means a module most closely: by name, then by expression, then by class."""
        kind = CLASSES.get(info.role, "Linear")
        found = [(_closeness(t, source, kind), group) for group in self.groups for t in group.targets]
        close = [(rank, group) for rank, group in found if rank is not None]
        return min(close, key=lambda entry: entry[0])[1] if close else None


class CompressedTensors(StoredMethod):
    """Dequantized at load. Activations are not quantized."""

    name: ClassVar[str] = "compressed_tensors"
    summary: ClassVar[str] = "compressed-tensors checkpoints, dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"compressed-tensors", "compressed_tensors"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> CompressedSpec:
        """Return the spec.

        Raises:
            ConfigError: a value is not known, or weights are compressed, or activations rotated, in a way that is not
                undone.
        """
        _refuse_others(config)
        written = _known_format(config.get("format") or "dense")
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise wrong("config_groups", groups, "a mapping of groups")
        made = tuple(_group(key, value, written) for key, value in groups.items())
        return CompressedSpec(made, names_in(config, "ignore"), rotations_of(config))

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: CompressedSpec) -> bool:
        """See StoredMethod."""
        if named(source, spec.ignored) or CLASSES.get(info.role) in spec.ignored:
            return True
        group = spec.group_of(info, source)
        return group is None or group.weights is None

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return "weight_packed" in facts or "weight_scale" in facts or MASK in facts

    @classmethod
    def is_packed(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: CompressedSpec) -> bool:
        """See StoredMethod. What is sparse or rotated need not be quantized."""
        changed = MASK in facts or bool(spec.rotations_of(info, source))
        return changed or super().is_packed(info, source, facts, spec)

    @classmethod
    def shared_tensors(cls, tensors: Mapping[str, TensorFacts], spec: CompressedSpec) -> SharedTensors:
        """See QuantizationMethod."""
        return stored_rotations(tensors, spec.rotations)

    @classmethod
    def experts_layout(cls, spec: CompressedSpec) -> str:
        """Return the layout of experts; some may be dense."""
        for group in spec.groups:
            args = group.weights
            if args is not None and (found := PACKED_LAYOUTS.get((args.kind, args.bits))):
                return found
        return "dense"

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: CompressedSpec) -> Storage:
        """See StoredMethod."""
        rotations = spec.rotations_of(info, source)
        if not rotations:
            return cls._unrotated(info, source, facts, spec)
        from jackfield_quantization.rotated_storage import RotatedStorage
        from jackfield_quantization.stored import PlainStorage

        _check_rotated(info, source, facts, rotations)
        if MASK in facts or super().is_packed(info, source, facts, spec):
            return RotatedStorage(cls._unrotated(info, source, facts, spec), rotations)
        refuse_narrow(info, source, facts)
        return RotatedStorage(PlainStorage(), rotations)

    @classmethod
    def _unrotated(
        cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: CompressedSpec
    ) -> Storage:
        from jackfield_quantization.compressed_storage import SparseStorage, storage_of

        if MASK in facts and cls.left_alone(info, source, spec):
            return SparseStorage(None)
        group = spec.group_of(info, source)
        assert group is not None and group.weights is not None, "asked only for modules of a group"
        made = storage_of(group.weights, group.format)
        if made is None:
            detail = f"{group.weights}, format {group.format}"
            raise unreadable(info, source, f"nothing reads {detail}", f"what is read: {SUPPORTED}")
        if facts and (ZERO in facts) is group.weights.symmetric:
            state = "has" if ZERO in facts else "lacks"
            detail = f"it {state} a {ZERO}, and the configuration says: {group.weights}"
            raise unreadable(info, source, detail, "correct quantization_config, or save the model again")
        return SparseStorage(made) if MASK in facts else made


def _check_rotated(
    info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], rotations: tuple[Rotation, ...]
) -> None:
    """Refuse rotations that cannot become part of a matrix.

    Raises:
        CheckpointError: there are some.
    """
    places = [rotation.place for rotation in rotations]
    remedy = "rotate weights alone, or other modules"
    if len(set(places)) < len(places):
        raise unreadable(info, source, "it is rotated twice at one place", remedy)
    if OUTPUT in places and "bias" in facts:
        raise unreadable(info, source, "its outputs are rotated behind a bias", remedy)
    if info.role not in ("linear", "head"):
        raise unreadable(info, source, f"activations of the role '{info.role}' are rotated", remedy)


def _closeness(target: str, source: str, kind: str) -> int | None:
    """Return how closely a target means a module (0 is closest), or None where it does not."""
    if target == kind:
        return 2
    if not named(source, (target,)):
        return None
    return 1 if target.startswith(REGEX) else 0


def _refuse_others(config: Mapping[str, object]) -> None:
    sparse = config.get("sparsity_config") or {}
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") not in SPARSE:
        remedy = f"use a checkpoint whose format of sparse weights is one of {', '.join(sorted(SPARSE))}"
        raise _not_undone("sparsity_config.format", sparse.get("format"), "sparse weights in another form", remedy)


def _not_undone(key: str, value: object, what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint has {what}, which are not supported",
        field=f"quantization_config.{key}",
        value=value,
        remedy=remedy,
    )


def _known_format(word: object) -> str:
    if word not in FORMATS:
        raise wrong("format", word, f"one of {', '.join(sorted(FORMATS))}")
    return str(word)


def _group(key: str, value: object, written: str) -> Group:
    field = f"config_groups.{key}"
    if not isinstance(value, Mapping):
        raise wrong(field, value, "a mapping")
    weights = value.get("weights")
    args = None if weights is None else _weights(f"{field}.weights", weights)
    return Group(names_in(value, "targets"), args, _known_format(value.get("format") or written))


def _weights(field: str, args: object) -> WeightArgs:
    if not isinstance(args, Mapping):
        raise wrong(field, args, "a mapping")
    size, bits = args.get("group_size"), args.get("num_bits", 8)
    strategy = str(args.get("strategy") or _implied(size))
    if strategy not in STRATEGIES:
        raise wrong(f"{field}.strategy", strategy, f"one of {', '.join(sorted(STRATEGIES))}")
    if not isinstance(bits, int) or not 2 <= bits <= 8:
        raise wrong(f"{field}.num_bits", bits, "a number from 2 to 8")
    grouped = strategy in ("group", "tensor_group")
    if grouped and (not isinstance(size, int) or size < 1):
        raise wrong(f"{field}.group_size", size, "a positive number")
    return WeightArgs(
        str(args.get("type", "int")).lower(),
        bits,
        strategy,
        group=size if grouped and isinstance(size, int) else 0,
        block=block_of(_pair(args.get("block_structure"))) if strategy == "block" else None,
        symmetric=bool(args.get("symmetric", True)),
    )


def _implied(size: object) -> str:
    """Return the strategy where only the size of groups is said."""
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _pair(value: object) -> object:
    """Return a block's size; old checkpoints write it as ``128x128``."""
    if isinstance(value, str):
        parts: Iterable[str] = value.split("x")
        return [int(part) if part.isdecimal() else part for part in parts]
    return value
