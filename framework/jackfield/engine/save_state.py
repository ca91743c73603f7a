"""Writes a model as its ranks hold it, so that later starts neither cut nor fuse weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from jackfield.checkpoint.sharded_state import MANIFEST, is_sharded_state, manifest_of
from jackfield.config import EngineConfig
from jackfield.distributed import SingleCommunicator
from jackfield.engine.core import worker_spec
from jackfield.engine.setup import Prepared, Progress, prepare
from jackfield.errors import ConfigError
from jackfield.interfaces import ModelFacts
from jackfield.loader import save_rank
from jackfield.sources.files import belongs
from jackfield.tokenizer import load_tokenizer
from jackfield.worker.build import fill_model, make_model, state_layout


def save_sharded_state(
    model: str | None,
    output: str | Path,
    *,
    config: EngineConfig | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Path:
    """Write the sharded state of a model into a new or empty folder and return the folder.

    Args:
        model, config, settings, progress: as for :class:`jackfield.LLM`. output: the folder.

    Raises:
        ConfigError: the folder is not empty, or the weights are random. JackfieldError: as for an engine.
    """
    prepared = prepare(model, config, settings, skip_tokenizer_init=True, progress=progress)
    folder = Path(output)
    check_output(prepared, folder)
    spec = worker_spec(prepared.resolution)
    device = spec.platform.bind(0, spec.config).device
    built = make_model(spec, device, SingleCommunicator())
    name = Path(spec.facts.path).name
    fill_model(spec, built, device, None if progress is None else lambda done, total: progress(name, done, total))
    folder.mkdir(parents=True, exist_ok=True)
    copy_files(spec.facts, folder)
    save_rank(built, folder)
    # Last, so that a folder that was not finished is none that can be read.
    _write(folder / MANIFEST, manifest_of(spec.facts, state_layout(spec)))
    return folder


def check_output(prepared: Prepared, folder: Path) -> None:
    """Refuse models that are no checkpoints, and folders that hold something.

    Raises:
        ConfigError: that is so.
    """
    settings, path = prepared.resolution.config.model, Path(prepared.resolution.facts.path)
    if settings.load_format == "dummy" or is_sharded_state(path):
        raise ConfigError(
            "weights are written from a checkpoint",
            field="model.model",
            value=str(path),
            remedy="name the model itself, and leave load_format out",
        )
    check_empty(folder)


def check_empty(folder: Path) -> None:
    """Refuse folders that hold something.

    Raises:
        ConfigError: that is so.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            "the output folder is not empty", field="output", value=str(folder), remedy="name a new folder"
        )


def copy_files(facts: ModelFacts, folder: Path) -> None:
    """Copy what a model folder has besides weights; those of further modules stay as they are."""
    source = Path(facts.path)
    if facts.container == "gguf":
        load_tokenizer(source, facts).save(folder)
        return
    for file in (*source.glob("*"), *source.glob("*/*")):
        path = file.relative_to(source)
        weights = len(path.parts) == 1 and (file.suffix == ".safetensors" or file.name.endswith(".index.json"))
        if belongs(PurePosixPath(path)) and not weights and file.is_file():
            (folder / path).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / path)


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, sort_keys=True), encoding="utf-8")
