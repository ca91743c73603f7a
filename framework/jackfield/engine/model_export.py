"""Hands a dense model to what writes it whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from jackfield.checkpoint import open_tensors
from jackfield.engine.setup import Prepared, Progress
from jackfield.interfaces import ModelExporter, ModelSource
from jackfield.loader.weights import to_torch
from jackfield.tokenizer import has_tokenizer, load_tokenizer
from jackfield.worker.build import WorkerSpec, weight_map

BESIDES = re.compile(r"^(?:pypi:|hf:)|(?:@|==).*")
"""What a user's word for a model has besides its name: where it comes from, and which version of it."""


def export_model(
    prepared: Prepared, spec: WorkerSpec, exporter: ModelExporter, folder: Path, progress: Progress | None
) -> None:
    """Write a model whole.

    Args:
        prepared, spec: the model. exporter: what writes it. folder: absent or empty. progress: told of bytes read.

    Raises:
        ConfigError: the container cannot say what the model is. JackfieldError: a file cannot be read.
    """
    ignored = [re.compile(pattern) for pattern in weight_map(spec).ignore]
    tensors = {
        name: fact for name, fact in spec.facts.tensors.items() if not any(rule.fullmatch(name) for rule in ignored)
    }
    with TemporaryDirectory() as files:
        exporter.write(
            ModelSource(
                name=model_name(str(spec.config.model.model)),
                architecture=spec.facts.architecture,
                config=spec.facts.config,
                tensors=tensors,
                read=_counted(spec, sum(fact.nbytes for fact in tensors.values()), progress),
                tokenizer=_tokenizer(prepared, spec, Path(files)),
                eos_token_ids=prepared.defaults.eos_token_ids,
                sampling=prepared.defaults.sampling,
            ),
            folder,
        )


def model_name(word: str) -> str:
    """Return the name of a model, as files can have it, in a user's word for it."""
    path = Path(word).expanduser()
    bare = str(path.resolve()) if path.exists() else word if "://" in word else BESIDES.sub("", word)
    return re.sub(r"[^\w.+-]+", "-", Path(bare).name).strip("-.") or "model"


def _counted(spec: WorkerSpec, total: int, progress: Progress | None) -> Callable[[str], torch.Tensor]:
    """Return what reads tensors, and tells of it."""
    facts, opened, done = spec.facts.tensors, open_tensors(spec.facts), 0

    def read(name: str) -> torch.Tensor:
        nonlocal done
        found = to_torch(opened.get(name), facts[name].dtype)
        done += facts[name].nbytes
        if progress is not None:
            progress("quantizing", done, total)
        return found

    return read


def _tokenizer(prepared: Prepared, spec: WorkerSpec, folder: Path) -> Path | None:
    """Write the files of the model's tokenizer, as the engine has it, into a folder, and return that, or None."""
    settings = prepared.resolution.config.model
    path = spec.facts.path if settings.tokenizer is None else settings.tokenizer
    if not has_tokenizer(path):
        return None
    stops = prepared.defaults.eos_token_ids
    load_tokenizer(path, spec.facts, mode=settings.tokenizer_mode, stops=stops).save(folder)
    return folder
