"""Readers of other libraries, for safetensors files: fastsafetensors and Run:ai Model Streamer. They are optional."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch

from jackfield.errors import CheckpointError, ConfigError
from jackfield.interfaces import ModelFacts
from jackfield.loader.reading import names_by_file

Pairs: TypeAlias = Iterator[tuple[str, torch.Tensor]]


class StreamedTensors:
    """The tensors of a checkpoint in the order in which a library gives them.

    Args:
        facts: of the checkpoint. read: yields names and tensors of one file; called with the file, the names to take
            from it and the device.
    """

    def __init__(
        self, facts: ModelFacts, read: Callable[[str, list[str], torch.device], Pairs], device: torch.device
    ) -> None:
        self.facts = facts
        self._read = read
        self._device = device
        self._held: tuple[str, torch.Tensor] | None = None

    def __iter__(self) -> Iterator[str]:
        for file, names in names_by_file(self.facts).items():
            missing = set(names)
            for name, tensor in self._read(file, names, self._device):
                if name in missing:
                    missing.discard(name)
                    self._held = (name, self._checked(name, tensor))
                    yield name
            self._held = None
            if missing:
                raise _wrong(f"the library did not give {len(missing)} tensors of {Path(file).name}", min(missing))

    def get(self, name: str) -> Any:
        """Return the tensor that the iteration is at."""
        assert self._held is not None and self._held[0] == name, "streamed tensors come in their own order"
        return self._held[1]

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        facts = self.facts.tensors[name]
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if (dtype, shape) != (facts.dtype, facts.shape):
            raise _wrong(f"the library gave {dtype} {shape}, the header says {facts.dtype} {facts.shape}", name)
        return tensor


def open_stream(load_format: str, facts: ModelFacts, device: torch.device) -> StreamedTensors:
    """Return a checkpoint's tensors as an optional library reads them.

    Args:
        load_format: a key of :data:`READERS`. facts: of a safetensors checkpoint. device: where the weights go.

    Raises:
        ConfigError: the library is not installed.
    """
    package, module, reader = READERS[load_format]
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"load_format {load_format} needs the package {package}: {error}",
            field="model.load_format",
            value=load_format,
            remedy=f"pip install {package}; or leave load_format out",
        ) from error
    return StreamedTensors(facts, lambda file, names, device: reader(library, file, names, device), device)


def _fastsafetensors(library: ModuleType, file: str, names: list[str], device: torch.device) -> Pairs:
    # GPU Direct Storage needs a driver of its own; without it the library copies through pinned memory.
    loader = library.SafeTensorsFileLoader(library.SingleGroup(), device, nogds=True)
    try:
        loader.add_filenames({0: [file]})
        buffer = loader.copy_files_to_device()
        try:
            for name in names:
                yield name, buffer.get_tensor(name)
        finally:
            buffer.close()
    finally:
        loader.close()


def _runai(library: ModuleType, file: str, names: list[str], device: torch.device) -> Pairs:
    with library.SafetensorsStreamer() as streamer:
        streamer.stream_file(file)
        yield from streamer.get_tensors()


READERS: Mapping[str, tuple[str, str, Callable[[ModuleType, str, list[str], torch.device], Pairs]]] = {
    "fastsafetensors": ("fastsafetensors", "fastsafetensors", _fastsafetensors),
    "runai_streamer": ("runai-model-streamer", "runai_model_streamer", _runai),
}
"""Load format → package, module, and the function that reads one file with it."""


def _wrong(message: str, tensor: str) -> CheckpointError:
    return CheckpointError(message, field="tensor", value=tensor, remedy="leave load_format out, and report it there")
