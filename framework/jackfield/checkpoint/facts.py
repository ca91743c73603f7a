"""Reads what a checkpoint says about itself: json files and headers, never weights."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jackfield.checkpoint.binary import corrupt
from jackfield.checkpoint.formats import containers_of
from jackfield.checkpoint.ggml_types import PLAIN_DTYPES, PREFIX
from jackfield.checkpoint.gguf_header import ArrayLimits, GgufFile, read_gguf
from jackfield.checkpoint.locate import CONTAINERS, gguf_files, gguf_in_folder, read_json, weights_in_folder
from jackfield.checkpoint.overrides import overridden
from jackfield.checkpoint.safetensors_header import read_safetensors
from jackfield.checkpoint.sharded_state import is_sharded_state, sharded_state_facts
from jackfield.checkpoint.torch_file import read_torch
from jackfield.errors import ModelNotFoundError
from jackfield.interfaces.facts import ModelFacts, TensorFacts

CONFIG_ARRAYS = ArrayLimits(numbers=1024, strings=64)
"""The longest arrays of GGUF metadata that ``ModelFacts.config`` holds. Numbers may be one per layer, so that their
limit lies above the layer count of any model; vocabularies stay out.
"""

ROPE_FACTORS, FACTORS_KEY = "rope_freqs.weight", "rope.factors"
"""A tensor of GGUF files that says what each rotary frequency is divided by, and the metadata key, behind the
architecture's name, that its numbers are given as.
"""
MAX_FACTORS = 4096
"""Half the features of a head, far more than any has."""

SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files of quantizers, and the format that each is about."""

NAMELESS = {"medusa_num_heads": "MedusaModel"}
"""Keys of configurations that name no architecture, and which one those are of."""

_READERS = {"safetensors": read_safetensors, "pytorch": read_torch}


def read_facts(path: str | Path, load_format: str = "auto", overrides: Mapping[str, Any] | None = None) -> ModelFacts:
    """Return the facts of the checkpoint at ``path``.

    Args:
        path: a GGUF file (of a sharded model, any shard), a folder with one GGUF model, a folder with config.json and
            safetensors or PyTorch files, a folder with a config.json alone, or one that ``save-sharded-state`` wrote.
        load_format: as ``model.load_format``; what is looked for first where a folder holds several containers.
        overrides: keys of config.json to replace; they do not touch GGUF metadata.

    Raises:
        ModelNotFoundError: nothing lies there, no checkpoint lies there, or parts of it are absent.
        CheckpointError: a file is damaged or contradicts itself or another one.
    """
    path = Path(path)
    if path.is_file():
        return _file_facts(path)
    if not path.is_dir():
        raise ModelNotFoundError(
            "there is no file or folder of this name", field="path", value=str(path), remedy="check the path"
        )
    if is_sharded_state(path):
        return sharded_state_facts(path)
    return _folder_facts(path, load_format, overrides or {})


def module_facts(folder: Path) -> ModelFacts:
    """Return the facts of one module's tensors in a folder of its own, beside a model.

    Raises:
        ModelNotFoundError: there are none. CheckpointError: a file is damaged.
    """
    for container in ("safetensors", "pytorch"):
        if files := weights_in_folder(folder, container):
            read = _READERS[container]
            tensors = _merge(folder, [_listed(file, read(file), names) for file, names in files.items()])
            return ModelFacts(str(folder), container, "", tensors=tensors)
    raise ModelNotFoundError("a module's folder holds no weights", field="path", value=str(folder))


def _file_facts(path: Path) -> ModelFacts:
    if path.suffix in (".json", ".safetensors", ".bin", ".pt", ".pth"):
        corrupt(path, f"{path.name} is one file of a checkpoint folder", remedy="name the folder")
    return _gguf_facts(path, gguf_files(path))


def _folder_facts(folder: Path, load_format: str, overrides: Mapping[str, Any]) -> ModelFacts:
    has_config = (folder / "config.json").is_file()
    wanted = containers_of(load_format)
    if "gguf" in wanted and len(wanted) == 1 and (ggufs := gguf_in_folder(folder)):
        return _gguf_facts(folder, ggufs)
    for container in sorted(CONTAINERS, key=lambda name: name not in wanted) if has_config else ():
        if files := weights_in_folder(folder, container):
            return _hf_facts(folder, container, files, overrides)
    if ggufs := gguf_in_folder(folder):
        return _gguf_facts(folder, ggufs)
    if has_config:
        return _hf_facts(folder, "config", {}, overrides)
    raise ModelNotFoundError(
        "the folder holds no model: neither a config.json nor a .gguf file",
        field="path",
        value=str(folder),
        remedy="name a GGUF file or a folder with config.json and safetensors files",
    )


def _gguf_facts(path: Path, files: list[Path]) -> ModelFacts:
    parts = [read_gguf(file, CONFIG_ARRAYS) for file in files]
    metadata = dict(parts[0].metadata)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        corrupt(files[0], f"{files[0].name} does not say its general.architecture", remedy="convert the model again")
    tensors = _merge(path, [part.tensors for part in parts])
    _check_split(path, parts, tensors)
    if (factors := tensors.pop(ROPE_FACTORS, None)) is not None:
        metadata[f"{architecture}.{FACTORS_KEY}"] = _numbers(factors)
    return ModelFacts(
        path=str(path),
        container="gguf",
        architecture=f"gguf:{architecture}",
        config=metadata,
        quantization="gguf",
        dtype=_plain_dtype(tensors.values()),
        tensors=tensors,
    )


def _numbers(tensor: TensorFacts) -> list[float]:
    """Return the numbers of a short tensor that says how to compute, and is no weight."""
    file = Path(tensor.file)
    if tensor.dtype != f"{PREFIX}F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
        message = f"{file.name}: '{tensor.name}' is {tensor.dtype} of the shape {list(tensor.shape)}"
        corrupt(file, message, remedy=f"it must be F32, and no longer than {MAX_FACTORS}")
    with file.open("rb") as opened:
        opened.seek(tensor.offset)
        raw = opened.read(tensor.nbytes)
    return [float(number) for number in struct.unpack(f"<{tensor.shape[0]}f", raw)]


def _check_split(path: Path, parts: list[GgufFile], tensors: Mapping[str, TensorFacts]) -> None:
    promised = parts[0].metadata.get("split.tensors.count")
    if len(parts) > 1 and promised is not None and promised != len(tensors):
        corrupt(path, f"the shards hold {len(tensors)} tensors, but the first one promises {promised}")


def _plain_dtype(tensors: Iterable[TensorFacts]) -> str:
    """Return the type that all matrices share when it is a plain one; norms are often stored wider."""
    words = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    return PLAIN_DTYPES.get(words.pop().removeprefix(PREFIX), "") if len(words) == 1 else ""


def _merge(path: Path, parts: list[Mapping[str, TensorFacts]]) -> dict[str, TensorFacts]:
    merged: dict[str, TensorFacts] = {}
    twice: list[str] = []
    for part in parts:
        twice += [name for name in part if name in merged]
        merged.update(part)
    if twice:
        corrupt(path, f"{len(twice)} tensors lie in more than one file, the first is '{twice[0]}'")
    return merged


def _hf_facts(
    folder: Path, container: str, files: Mapping[Path, frozenset[str] | None], overrides: Mapping[str, Any]
) -> ModelFacts:
    config = overridden(read_json(folder / "config.json"), overrides)
    quantization, quantization_config = _quantization(folder, config)
    read = _READERS.get(container, read_safetensors)
    return ModelFacts(
        path=str(folder),
        container=container,
        architecture=_architecture(folder, config),
        config=config,
        quantization=quantization,
        quantization_config=quantization_config,
        dtype=_saved_dtype(config),
        tensors=_merge(folder, [_listed(file, read(file), names) for file, names in files.items()]),
    )


def _listed(file: Path, tensors: Mapping[str, TensorFacts], names: frozenset[str] | None) -> Mapping[str, TensorFacts]:
    if names is None:
        return tensors
    absent = sorted(names - tensors.keys())
    if absent:
        corrupt(file, f"{file.name} lacks {len(absent)} tensors that the index promises, the first is '{absent[0]}'")
    return {name: tensors[name] for name in tensors if name in names}


def _architecture(folder: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [name for key, name in NAMELESS.items() if key in config]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        corrupt(
            folder / "config.json",
            "config.json names no architecture",
            remedy='add "architectures": ["..."] with the class that the model was saved from',
        )
    return names[0]


def _saved_dtype(config: Mapping[str, Any]) -> str:
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            value = section.get(key)
            if isinstance(value, str) and value != "auto":
                return value.removeprefix("torch.")
    return ""


def _quantization(folder: Path, config: Mapping[str, Any]) -> tuple[str, Mapping[str, object]]:
    section = config.get("quantization_config") or config.get("compression_config")
    if section is None:
        section = _from_side_file(folder)
    if section is None:
        return "", {}
    method = _quantization_method(section) if isinstance(section, Mapping) else ""
    if not method:
        corrupt(folder / "config.json", "quantization_config does not name its quant_method", remedy="add quant_method")
    return method, section


def _from_side_file(folder: Path) -> Mapping[str, Any] | None:
    """Return what checkpoints say in a file of their own, from before config.json could say so, or None."""
    for name, method in SIDE_FILES.items():
        if (folder / name).is_file():
            found = read_json(folder / name)
            nested = found.get("quantization")
            return {"quant_method": method, **(nested if isinstance(nested, Mapping) else found)}
    return None


def _quantization_method(section: Mapping[str, Any]) -> str:
    method = section.get("quant_method")
    if method is None and (section.get("load_in_4bit") or section.get("load_in_8bit")):
        return "bitsandbytes"
    return method.lower() if isinstance(method, str) else ""
