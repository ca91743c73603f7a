"""Writes a quantized checkpoint of a dense one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jackfield.checkpoint import open_tensors
from jackfield.config import EngineConfig
from jackfield.distributed import SingleCommunicator
from jackfield.engine.core import worker_spec
from jackfield.engine.save_state import check_output, copy_files
from jackfield.engine.setup import Progress, prepare
from jackfield.errors import ConfigError
from jackfield.interfaces import Exporter
from jackfield.interfaces.facts import split_name
from jackfield.layers.parameters import SchemeWeight
from jackfield.loader.weights import to_torch
from jackfield.worker.build import WorkerSpec, make_model, weight_map

FILE_BYTES = 5 << 30
"""How large a file of weights may become."""


def quantize(
    model: str | None,
    output: str | Path,
    *,
    config: EngineConfig | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Path:
    """Write the checkpoint that the chosen quantization method makes of a model into a new or empty folder, and return
    the folder.

    Args:
        model, config, settings, progress: as for :class:`jackfield.LLM`; ``quantization.force`` names the method.
            output: the folder.

    Raises:
        ConfigError: the folder is not empty, or the method writes no checkpoints. JackfieldError: as for an engine.
    """
    prepared = prepare(model, config, settings, skip_tokenizer_init=True, progress=progress)
    folder = Path(output)
    check_output(prepared, folder)
    spec = worker_spec(prepared.resolution)
    exporter = _exporter(spec)
    modules = converted_modules(spec)
    folder.mkdir(parents=True, exist_ok=True)
    copy_files(spec.facts, folder)
    written = _Files(folder)
    plain = []
    for name, module, tensor in _tensors(spec, progress):
        if module in modules:
            written.add({f"{module}.{suffix}": made for suffix, made in exporter.tensors(tensor).items()})
            continue
        written.add({name: tensor})
        if name.endswith(".weight") and tensor.dim() == 2:
            plain.append(module)
    written.finish()
    # Last, so that a folder that was not finished is none that can be read.
    _write_json(folder / "config.json", {**spec.facts.config, "quantization_config": dict(exporter.config(plain))})
    return folder


def converted_modules(spec: WorkerSpec) -> frozenset[str]:
    """Return the checkpoint modules that the method converts; nothing is loaded for that."""
    built = make_model(spec, torch.device("meta"), SingleCommunicator())
    method, parsed = spec.quantization, _method_spec(spec)
    found = (module.info for module in built.modules() if isinstance(module, SchemeWeight))
    targets = {info.name for info in found if method.scheme(info, parsed) is not None}
    weights = weight_map(spec)
    rules = [rule for rule in weights.rules if rule.target in targets and not rule.transposed]
    return frozenset(name for rule in rules for name in (rule.source, rule.source.removeprefix(weights.droppable)))


def _method_spec(spec: WorkerSpec) -> Any:
    return spec.quantization.spec_of(spec.facts.quantization_config, spec.quantization_settings)


def _exporter(spec: WorkerSpec) -> Exporter:
    found = spec.quantization.exporter(_method_spec(spec))
    if spec.facts.quantization or found is None:
        raise ConfigError(
            f"the quantization method '{spec.quantization.name}' writes no checkpoints of this model",
            field="quantization.force",
            value=spec.quantization.name,
            remedy="name a method that converts dense weights, and a model that is not quantized",
        )
    return found


def _tensors(spec: WorkerSpec, progress: Progress | None) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield name, module and content of each tensor."""
    facts, source = spec.facts.tensors, open_tensors(spec.facts)
    total, done = sum(fact.nbytes for fact in facts.values()), 0
    for name, fact in facts.items():
        module, suffix = split_name(name, facts)
        yield name, module if suffix == "weight" else "", to_torch(source.get(name), fact.dtype)
        done += fact.nbytes
        if progress is not None:
            progress("quantizing", done, total)


class _Files:
    """Files of tensors, each up to a size, and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._size = self._total = self._count = 0
        self._places: dict[str, str] = {}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors, and write a file when enough of them wait."""
        for name, tensor in tensors.items():
            self._waiting[name] = tensor.contiguous()
            self._size += tensor.numel() * tensor.element_size()
        if self._size >= FILE_BYTES:
            self._write()

    def finish(self) -> None:
        """Write what waits, and the index where there are several files."""
        if self._waiting:
            self._write()
        if self._count == 1:
            (self._folder / self._name(1)).rename(self._folder / "model.safetensors")
            return
        index = {"metadata": {"total_size": self._total}, "weight_map": self._places}
        _write_json(self._folder / "model.safetensors.index.json", index)

    def _write(self) -> None:
        self._count += 1
        name = self._name(self._count)
        save_file(self._waiting, self._folder / name, {"format": "pt"})
        self._places |= dict.fromkeys(self._waiting, name)
        self._total += self._size
        self._waiting, self._size = {}, 0

    def _name(self, number: int) -> str:
        return f"model-{number:05d}.safetensors"


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
