"""Writes and reads what a rank holds after its weights were cut and fused, before kernels repack them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from jackfield.checkpoint import open_tensors
from jackfield.checkpoint.safetensors_header import read_safetensors
from jackfield.checkpoint.sharded_state import StateLayout, rank_file, state_layout
from jackfield.errors import CheckpointError
from jackfield.interfaces import ModelFacts, TensorFacts
from jackfield.loader.reading import ReadAhead
from jackfield.loader.weights import Progress, finalize, to_torch


def save_rank(model: nn.Module, folder: Path, rank: int = 0) -> Path:
    """Write a rank's parameters, which must not have been finalized, and return the file."""
    from safetensors.torch import save_file

    file = rank_file(folder, rank)
    parameters = {name: parameter.detach().contiguous().cpu() for name, parameter in model.named_parameters()}
    save_file(parameters, file)
    return file


def load_sharded_state(
    model: nn.Module,
    facts: ModelFacts,
    wanted: StateLayout,
    *,
    rank: int = 0,
    threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """Fill ``model`` from a folder that :func:`save_rank` wrote to.

    Args:
        model: built, empty. facts: of the folder. wanted: what the model was built for. rank: of this process.
        threads: that read ahead. progress: called with (bytes done, bytes in all).

    Raises:
        CheckpointError: the state was saved for something else, or does not have exactly the model's parameters.
    """
    folder = Path(facts.path)
    check_layout(state_layout(folder), wanted, folder)
    stored = read_safetensors(rank_file(folder, rank))
    parameters = dict(model.named_parameters())
    _check_parameters(parameters, stored, folder)
    source = ReadAhead(open_tensors(ModelFacts(str(folder), "safetensors", "", tensors=stored)), threads)
    total, done = sum(tensor.nbytes for tensor in stored.values()), 0
    with torch.no_grad():
        for name in source:
            parameters[name].copy_(to_torch(source.get(name), stored[name].dtype))
            done += stored[name].nbytes
            if progress:
                progress(done, total)
    finalize(model)


def check_layout(saved: StateLayout, wanted: StateLayout, folder: Path) -> None:
    """Compare what a state was saved for with what it is read for.

    Raises:
        CheckpointError: lists all differences.
    """
    names = [one.name for one in fields(StateLayout) if getattr(saved, one.name) != getattr(wanted, one.name)]
    if names:
        listing = ", ".join(f"{name} {getattr(saved, name)}, not {getattr(wanted, name)}" for name in names)
        raise CheckpointError(
            f"the sharded state was saved for {listing}",
            field="model.model",
            value=str(folder),
            remedy="use the settings that it was saved with, or save it again with: jackfield save-sharded-state",
        )


def _check_parameters(parameters: dict[str, nn.Parameter], stored: dict[str, TensorFacts], folder: Path) -> None:
    wrong = sorted(parameters.keys() ^ stored.keys())
    for name in parameters.keys() & stored.keys():
        dtype = str(parameters[name].dtype).removeprefix("torch.")
        if (tuple(parameters[name].shape), dtype) != (stored[name].shape, stored[name].dtype):
            wrong.append(name)
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} parameters of the sharded state are not the model's: {', '.join(sorted(wrong)[:8])}",
            field="model.model",
            value=str(folder),
            remedy="save it again with: jackfield save-sharded-state",
        )
