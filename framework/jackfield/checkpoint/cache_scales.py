"""Which scales of keys and values a checkpoint ships, and which layers they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from jackfield.errors import CheckpointError
from jackfield.interfaces import CacheScheme, WeightMap, WeightRule

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
"""In a module's path: the layer it belongs to."""
SUFFIXES = {"k": "k_scale", "v": "v_scale"}
"""Parameters by what they scale."""


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Scales of a checkpoint.

    Args:
        layers: names of tensors by layer and by what they scale, ``k`` or ``v``. idle: known scales that no cache has
            a use for.
    """

    layers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    idle: tuple[str, ...] = ()

    @property
    def used(self) -> list[str]:
        """Names of the tensors that belong to layers."""
        return list(dict.fromkeys(name for found in self.layers.values() for name in found.values()))

    def rules(self) -> Iterator[WeightRule]:
        """Yield where the tensors go."""
        for layer, found in self.layers.items():
            for part, name in found.items():
                yield WeightRule(name, cache_scales_path(layer), suffix=SUFFIXES[part])


def cache_scales_path(layer: int) -> str:
    """Return the module path of a layer's scales."""
    return f"layers.{layer}.cache_scales"


def find_cache_scales(scheme: CacheScheme | None, names: Iterable[str], weights: WeightMap) -> CacheScales:
    """Return the scales of a checkpoint.

    Args:
        scheme: how its cache is quantized, or None. names: of all tensors. weights: where its weights go: a scale
            belongs to the layer to which its neighbours go.

    Raises:
        CheckpointError: two tensors scale the same thing.
    """
    roles = {name: role for name in names if scheme is not None and (role := scheme.role(name))}
    if not roles:
        return CacheScales()
    layers: dict[int, dict[str, str]] = {}
    neighbours, idle = _layers_by_module(weights), []
    for name, role in roles.items():
        layer = _layer_of(name, neighbours)
        parts = [part for part in SUFFIXES if part in (role, *(SUFFIXES if role == "kv" else ()))]
        if layer is None or not parts:
            idle.append(name)
            continue
        for part in parts:
            other = layers.setdefault(layer, {}).setdefault(part, name)
            if other != name:
                raise CheckpointError(
                    f"two tensors scale '{part}' of layer {layer}: {other} and {name}",
                    field="checkpoint",
                    value=name,
                    remedy="remove one of them from the checkpoint",
                )
    return CacheScales(layers, tuple(idle))


def _layers_by_module(weights: WeightMap) -> dict[str, int]:
    """Return the layer of every checkpoint module with weights in one, and of the modules around it, as far as they
    are around no other layer.
    """
    found: dict[str, set[int]] = {}
    for rule in weights.rules:
        if match := LAYER.search(rule.target):
            for start in (rule.source, rule.source.removeprefix(weights.droppable)):
                for module in _around(start):
                    found.setdefault(module, set()).add(int(match[1]))
    return {module: next(iter(layers)) for module, layers in found.items() if len(layers) == 1}


def _layer_of(name: str, neighbours: Mapping[str, int]) -> int | None:
    return next((neighbours[module] for module in _around(name) if module in neighbours), None)


def _around(name: str) -> Iterator[str]:
    """Yield a path, and what it lies in, from the inside out."""
    while name:
        yield name
        name = name.rpartition(".")[0]
