"""Writes a quantized checkpoint of a dense one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jackfield.checkpoint import open_tensors
from jackfield.config import EngineConfig
from jackfield.distributed import SingleCommunicator
from jackfield.engine.calibration import Calibration, Texts
from jackfield.engine.core import worker_spec
from jackfield.engine.model_export import export_model
from jackfield.engine.save_state import check_output, copy_files
from jackfield.engine.scaling import Load, Scales
from jackfield.engine.setup import Progress, prepare
from jackfield.errors import ConfigError
from jackfield.interfaces import Exporter, ModelExporter
from jackfield.interfaces.facts import split_name
from jackfield.layers.parameters import SchemeWeight
from jackfield.loader.weights import to_torch
from jackfield.registry import Registry
from jackfield.worker.build import WorkerSpec, make_model, weight_map

FILE_BYTES = 5 << 30
"""How large a file of weights may become."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written.

    Args:
        folder: of the checkpoint. unscaled: modules that the method would have scaled; nothing is known before them
            that could be divided by factors.
    """

    folder: Path
    unscaled: tuple[str, ...] = ()


def quantize(
    model: str | None,
    output: str | Path,
    *,
    config: EngineConfig | None = None,
    progress: Progress | None = None,
    texts: Texts | None = None,
    **settings: Any,
) -> Quantized:
    """Write the checkpoint that the chosen quantization method makes of a model into a new or empty folder.

    Args:
        model, config, settings, progress: as for :class:`jackfield.LLM`; ``quantization.force`` names the method.
            output: the folder. texts: for methods that look at what matrices are given.

    Raises:
        ConfigError: the folder is not empty, the method writes no checkpoints, or it needs texts and has none, or has
            some and needs none. JackfieldError: as for an engine.
    """
    prepared = prepare(model, config, settings, skip_tokenizer_init=True, progress=progress)
    folder = Path(output)
    check_output(prepared, folder)
    spec = worker_spec(prepared.resolution)
    whole = _model_exporter(spec)
    if whole is not None:
        check_texts(spec, texts, calibrates=False)
        export_model(prepared, spec, whole, folder, progress)
        return Quantized(folder)
    exporter = _exporter(spec)
    check_texts(spec, texts, calibrates=exporter.calibrates)
    modules = converted_modules(spec)
    if not modules:
        raise ConfigError(
            "there is no matrix of the model that the method converts",
            field="quantization.force",
            value=spec.quantization.name,
            remedy="look at the method's options: groups that divide no layer's inputs, or names that are no layer's",
        )
    calibration = None
    if texts is not None:
        calibration = Calibration(prepared.resolution.config, texts, weight_map(spec), progress)
    folder.mkdir(parents=True, exist_ok=True)
    copy_files(spec.facts, folder)
    written = _Files(folder)
    scales = Scales(weight_map(spec), spec.facts.tensors, _loader(spec), modules)
    calibrated: list[str] = []
    if calibration is not None:
        for module, made in _calibrated(calibration, spec, exporter, scales, modules, progress):
            written.add({f"{module}.{suffix}": tensor for suffix, tensor in made.items()})
            calibrated.append(module)
    plain = []
    for name, module, tensor in _tensors(spec, progress):
        if module in modules:
            found = {} if exporter.calibrates else exporter.tensors(tensor)
            written.add({f"{module}.{suffix}": made for suffix, made in found.items()})
            continue
        written.add({name: scales.plain[name].cpu() if name in scales.plain else tensor})
        if name.endswith(".weight") and tensor.dim() == 2:
            plain.append(module)
    written.finish()
    # Last, so that a folder that was not finished is none that can be read.
    _write_json(folder / "config.json", {**spec.facts.config, "quantization_config": dict(exporter.config(plain))})
    return Quantized(folder, tuple(m for m in calibrated if exporter.scales and m not in scales.scaled))


def writer_of(word: str, registry: Registry) -> str:
    """Return the name of the method that writes a format, or the word itself where it is no format's.

    Raises:
        ConfigError: several methods write it.
    """
    refs = registry.refs("quantization_methods")
    found = [ref.name for ref in refs if (made := ref.load()) is not None and getattr(made, "writes", "") == word]
    if len(found) > 1:
        raise ConfigError(
            f"several methods write '{word}': {', '.join(found)}",
            field="format",
            value=word,
            remedy="name one of the methods",
        )
    return found[0] if found else word


def check_texts(spec: WorkerSpec, texts: Texts | None, *, calibrates: bool) -> None:
    """Refuse a writer that looks at texts and has none, and one that has some and would not look.

    Raises:
        ConfigError: that is so.
    """
    name = spec.quantization.writes or spec.quantization.name
    if calibrates == (texts is not None):
        return
    raise ConfigError(
        f"'{name}' needs a text to calibrate with" if calibrates else f"'{name}' looks at no text",
        field="text",
        value=None if texts is None else str(texts.file),
        remedy="name a file with --text" if calibrates else "leave --text out",
    )


def _calibrated(
    calibration: Calibration,
    spec: WorkerSpec,
    exporter: Exporter,
    scales: Scales,
    modules: frozenset[str],
    progress: Progress | None,
) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """Yield the tensors of each module, by suffix, in the model's order."""
    facts, load = spec.facts.tensors, _loader(spec)
    there = [module for module in modules if f"{module}.weight" in facts]
    total, done = sum(facts[f"{module}.weight"].nbytes for module in there), 0
    try:
        for moments in calibration.stages(there):
            weights = {module: load(f"{module}.weight").to(m_II.device) for module, m_II in moments.items()}
            if exporter.scales:
                scales.find(exporter, weights, moments)
            for module, moments_II in moments.items():
                made, meaning_OI = scales.written(exporter, module, weights[module], moments_II)
                calibration.replace(module, meaning_OI)
                yield module, {suffix: tensor.cpu() for suffix, tensor in made.items()}
                done += facts[f"{module}.weight"].nbytes
                if progress is not None:
                    progress("calibrating", done, total)
    finally:
        calibration.close()


def _loader(spec: WorkerSpec) -> Load:
    """Return what reads single tensors of the checkpoint."""
    facts, source = spec.facts.tensors, open_tensors(spec.facts)
    return lambda name: to_torch(source.get(name), facts[name].dtype)


def converted_modules(spec: WorkerSpec) -> frozenset[str]:
    """Return the checkpoint modules that the method converts; nothing is loaded for that."""
    built = make_model(spec, torch.device("meta"), SingleCommunicator())
    method, parsed = spec.quantization, _method_spec(spec)
    found = (module.info for module in built.modules() if isinstance(module, SchemeWeight))
    targets = {info.name for info in found if method.scheme(info, parsed) is not None}
    weights = weight_map(spec)
    return frozenset(name for name, rule in weights.named() if rule.target in targets and not rule.transposed)


def _method_spec(spec: WorkerSpec) -> Any:
    return spec.quantization.spec_of(spec.facts.quantization_config, spec.quantization_settings)


def _model_exporter(spec: WorkerSpec) -> ModelExporter | None:
    found = spec.quantization.model_exporter(_method_spec(spec))
    if found is not None and spec.facts.quantization:
        raise _writes_none(spec)
    return found


def _exporter(spec: WorkerSpec) -> Exporter:
    found = spec.quantization.exporter(_method_spec(spec))
    if spec.facts.quantization or found is None:
        raise _writes_none(spec)
    return found


def _writes_none(spec: WorkerSpec) -> ConfigError:
    return ConfigError(
        f"the quantization method '{spec.quantization.name}' writes no checkpoints of this model",
        field="quantization.force",
        value=spec.quantization.name,
        remedy="name a method that converts dense weights, and a model that is not quantized",
    )


def _tensors(spec: WorkerSpec, progress: Progress | None) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield name, module and content of each tensor."""
    facts, load = spec.facts.tensors, _loader(spec)
    total, done = sum(fact.nbytes for fact in facts.values()), 0
    for name, fact in facts.items():
        module, suffix = split_name(name, facts)
        yield name, module if suffix == "weight" else "", load(name)
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
