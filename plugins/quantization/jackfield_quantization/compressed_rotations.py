"""Rotations in checkpoints of compressed-tensors: which there are, where, and which tensors hold them. No torch.

A linear layer computes ``y = ((x V) W.T) U``, where ``W`` is what is stored and ``V`` and ``U`` are the rotations of
its inputs and outputs. Rotations of weights (``weight_input``, ``weight_output``) are in ``W`` already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jackfield.errors import ConfigError
from jackfield.interfaces import SharedTensors, TensorFacts
from jackfield_quantization.matching import named, names_in, wrong

KEY = "transform_config.config_groups"
INPUT, OUTPUT = "input", "output"
FUSED = frozenset({"weight_input", "weight_output"})
"""Places where a rotation is part of the weights that are stored."""
SCORES = frozenset({"q_attn", "k_cache"})
"""Places behind rotary embeddings; the same rotation at both changes no product of queries and keys."""
PLACES = (INPUT, OUTPUT, *sorted(FUSED), *sorted(SCORES))
HADAMARD, RANDOM_HADAMARD, RANDOM_MATRIX = "hadamard", "random-hadamard", "random-matrix"
KINDS = (HADAMARD, RANDOM_HADAMARD, RANDOM_MATRIX)
ORTHOGONAL = (HADAMARD, RANDOM_HADAMARD)
"""Their transposes are their inverses, but for the root of their size."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """One rotation at one place.

    Args:
        name: of the group that has it. kind: one of :data:`KINDS`. place: :data:`INPUT` or :data:`OUTPUT`. size: of the
            blocks that are rotated each, 0 for all inputs or outputs together. inverse: its inverse is meant. targets,
            ignored: modules that are meant, as in groups of weights.
    """

    name: str
    kind: str
    place: str
    size: int = 0
    inverse: bool = False
    targets: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def is_stored(self) -> bool:
        """Whether the checkpoint has its numbers; others are made."""
        return self.kind != HADAMARD

    def takes(self, source: str, kind: str) -> bool:
        """Return whether a checkpoint module of a class is meant."""
        if kind in self.ignored or named(source, self.ignored):
            return False
        return kind in self.targets or named(source, self.targets)

    def suffix(self, size: int) -> str:
        """Return what a layer calls the parameter with its numbers."""
        return f"{self.name}_{self.place}.{size}"


def rotations_of(config: Mapping[str, object]) -> tuple[Rotation, ...]:
    """Return the rotations of inputs and outputs that a configuration says.

    Raises:
        ConfigError: a value is not known, or is not undone here.
    """
    section = config.get("transform_config") or {}
    groups = section.get("config_groups") if isinstance(section, Mapping) else None
    if not groups:
        return ()
    if not isinstance(groups, Mapping):
        raise wrong(KEY, groups, "a mapping of groups")
    found: list[Rotation] = []
    for name, group in groups.items():
        found += _of_group(str(name), group)
    return tuple(found)


def _of_group(name: str, group: object) -> Iterable[Rotation]:
    places = group.get("apply", []) if isinstance(group, Mapping) else group
    if not isinstance(places, list):
        raise wrong(f"{KEY}.{name}.apply", places, "a list of places")
    assert isinstance(group, Mapping), "else it has no list of places"
    where = [place.get("location") if isinstance(place, Mapping) else place for place in places]
    strange = [word for word in where if word not in PLACES]
    if strange:
        raise wrong(f"{KEY}.{name}.apply", strange[0], f"one of {', '.join(PLACES)}")
    _check_scores(name, str(group.get("type")), places, where)
    for place, word in zip(places, where, strict=True):
        if word in (INPUT, OUTPUT):
            yield _rotation(name, group, place)


def _check_scores(name: str, kind: str, places: Sequence[object], where: Sequence[object]) -> None:
    """Refuse rotations of queries or keys that do not cancel one another.

    Raises:
        ConfigError: there are some.
    """
    found = {str(word): place for place, word in zip(places, where, strict=True) if word in SCORES}
    meant = [{k: v for k, v in p.items() if k != "location"} for p in found.values() if isinstance(p, Mapping)]
    if not found or (found.keys() == SCORES and meant[0] == meant[1] and kind in ORTHOGONAL):
        return
    raise ConfigError(
        "queries or keys are rotated, and not both by the same rotation",
        field=f"quantization_config.{KEY}.{name}.apply",
        value=sorted(found),
        remedy="use a checkpoint whose rotations of queries and keys cancel one another",
    )


def _rotation(name: str, group: Mapping[str, object], place: Mapping[str, object]) -> Rotation:
    field = f"{KEY}.{name}"
    kind, size = group.get("type"), group.get("head_dim")
    if kind not in KINDS:
        raise wrong(f"{field}.type", kind, f"one of {', '.join(KINDS)}")
    if group.get("randomize"):
        raise wrong(f"{field}.randomize", True, "false: rotations are the same in all layers")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise wrong(f"{field}.head_dim", size, "a positive number")
    targets, ignored = names_in(_listed(place), "targets"), names_in(_listed(place), "ignore")
    inverse = bool(place.get("inverse", False))
    return Rotation(name, str(kind), str(place["location"]), size or 0, inverse, targets, ignored)


def _listed(place: Mapping[str, object]) -> dict[str, object]:
    """Return a place whose single names are lists of one."""
    return {key: [value] if isinstance(value, str) else value for key, value in place.items()}


def stored_rotations(tensors: Mapping[str, TensorFacts], rotations: Sequence[Rotation]) -> SharedTensors:
    """Return the tensors of rotations: one of each size serves all layers, whichever has it in the checkpoint."""
    names: dict[str, str] = {}
    ignored = []
    for rotation in rotations:
        ignored.append(rf".*\.{re.escape(rotation.name)}_(input|output|q_attn|k_cache)\.weight")
        if rotation.is_stored:
            for name, fact in _holders(tensors, rotation):
                names.setdefault(rotation.suffix(fact.shape[0]), name)
    return SharedTensors(names, tuple(dict.fromkeys(ignored)))


def _holders(tensors: Mapping[str, TensorFacts], rotation: Rotation) -> list[tuple[str, TensorFacts]]:
    """Return tensors that hold a rotation, those of its own place first. An orthogonal matrix is stored once for both
    directions; of others the inverse is a matrix of its own.
    """
    places = (rotation.place,) if rotation.kind == RANDOM_MATRIX else (rotation.place, INPUT, OUTPUT)
    ends = [f".{rotation.name}_{place}.weight" for place in places]
    return [(name, fact) for end in ends for name, fact in tensors.items() if name.endswith(end) and fact.shape]
