"""The manifest of a folder with one model as its ranks hold it: parameters already cut and fused, not yet repacked for
a kernel. ``sharded_state.json`` says what they were made from and for; each rank has a safetensors file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jackfield.checkpoint.binary import corrupt
from jackfield.checkpoint.locate import read_json
from jackfield.interfaces.facts import ModelFacts, TensorFacts

MANIFEST = "sharded_state.json"
VERSION = 1
_TEXTS = ("container", "architecture", "quantization", "dtype")
_MAPS = ("config", "quantization_config", "tensors")


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What the saved parameters depend on, and must be the same when they are read.

    Args:
        tensor_parallel_size: ranks that share each layer. quantization, plain: methods. dtype: of computation.
        implementation: the model plugin.
    """

    tensor_parallel_size: int
    quantization: str
    plain: str
    dtype: str
    implementation: str


def is_sharded_state(folder: Path) -> bool:
    """Return whether a folder holds a sharded state."""
    return (folder / MANIFEST).is_file()


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank-{rank:05d}.safetensors"


def manifest_of(facts: ModelFacts, layout: StateLayout) -> dict[str, Any]:
    """Return the manifest of a model's state, as json data."""
    tensors = {name: [tensor.dtype, list(tensor.shape)] for name, tensor in facts.tensors.items()}
    kept = {name: getattr(facts, name) for name in (*_TEXTS, "config", "quantization_config")}
    return {"version": VERSION, "layout": asdict(layout), "facts": {**kept, "tensors": tensors}}


def sharded_state_facts(folder: Path) -> ModelFacts:
    """Return the facts of the checkpoint that a sharded state was made from; its tensors have no bytes here.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    path = folder / MANIFEST
    facts = _section(path, "facts")
    if not all(isinstance(facts.get(key), str) for key in _TEXTS):
        corrupt(path, f"{path.name}: one of {', '.join(_TEXTS)} is absent or no text")
    if not all(isinstance(facts.get(key), dict) for key in _MAPS):
        corrupt(path, f"{path.name}: one of {', '.join(_MAPS)} is absent or no object")
    return ModelFacts(
        path=str(folder),
        tensors={name: _tensor(path, name, value) for name, value in facts["tensors"].items()},
        **{key: facts[key] for key in (*_TEXTS, "config", "quantization_config")},
    )


def state_layout(folder: Path) -> StateLayout:
    """Return what a sharded state was made for; raises CheckpointError where the manifest does not say it."""
    path = folder / MANIFEST
    try:
        return StateLayout(**_section(path, "layout"))
    except TypeError as error:
        corrupt(path, f"{path.name}: its layout is incomplete: {error}")


def _section(path: Path, name: str) -> Mapping[str, Any]:
    manifest = read_json(path)
    if manifest.get("version") != VERSION or not isinstance(manifest.get(name), dict):
        corrupt(
            path,
            f"{path.name} has version {manifest.get('version')!r}, or no {name}; version {VERSION} is known",
            remedy="write it again with: jackfield save-sharded-state",
        )
    section: Mapping[str, Any] = manifest[name]
    return section


def _tensor(path: Path, name: str, value: Any) -> TensorFacts:
    match value:
        case [str(dtype), list(shape)] if all(type(size) is int and size >= 0 for size in shape):
            return TensorFacts(name, dtype, tuple(shape))
    corrupt(path, f"{path.name}: tensor '{name}' is described as {value!r}")
