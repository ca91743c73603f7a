"""Facts: what is known about devices and checkpoints before anything is loaded. Plain data, the same in every
process.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a platform says about one device, read without creating a context on it.

    Args:
        type: torch's name of the device type (``cpu``, ``cuda``).
        name: what the vendor calls it.
        index: ordinal on this host.
        capability: (major, minor) of the instruction set where the vendor counts so, else ``(0, 0)``.
        memory_bytes: total memory.
        cores: multiprocessors of an accelerator, or physical cores of a CPU usable by this process.
        features: names of hardware features (``avx512_bf16``, ``tma``); open vocabulary.
    """

    type: str
    name: str = ""
    index: int = 0
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    cores: int = 1
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of a checkpoint, read from a header.

    Args:
        name: its name in the checkpoint.
        dtype: storage type in torch's words (``bfloat16``), or the format's own word for packed types (``ggml:Q4_1``).
        shape: logical shape, outermost dimension first (for packed types the shape after unpacking).
        file: path of the file that holds it.
        offset: first byte inside the file.
        nbytes: stored size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    offset: int = 0
    nbytes: int = 0


def split_name(name: str, names: Container[str]) -> tuple[str, str]:
    """Return a tensor's module and what follows it. What belongs to another tensor belongs to that one's module.

    Args:
        name: of the tensor. names: of all tensors.

    >>> split_name("up.weight.absmax", {"up.weight", "up.weight.absmax"})
    ('up', 'weight.absmax')
    """
    owner = name
    for at, letter in enumerate(name):
        if letter == "." and name[:at] in names:
            owner = name[:at]
            break
    module, _, _ = owner.rpartition(".")
    return module, name[len(module) + 1 :] if module else name


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a checkpoint says about itself, from json and headers alone.

    Args:
        path: file or folder.
        container: ``safetensors``, ``gguf`` or ``config`` (a folder with a config.json and no weights).
        architecture: the HF architecture string, or for GGUF ``gguf:`` and its ``general.architecture``.
        config: the keys of config.json, or the metadata keys of a GGUF file (large arrays left out).
        quantization: the checkpoint format of the weights (``gguf``, ``gptq``), or ``""``.
        quantization_config: the raw ``quantization_config`` of config.json.
        dtype: the type that the checkpoint was saved for, in torch's words, or ``""``.
        tensors: all tensors by name.
    """

    path: str
    container: str
    architecture: str
    config: Mapping[str, object] = field(default_factory=dict)
    quantization: str = ""
    quantization_config: Mapping[str, object] = field(default_factory=dict)
    dtype: str = ""
    tensors: Mapping[str, TensorFacts] = field(default_factory=dict)
