"""Which files of a checkpoint folder are a model: weights, configuration and tokenizer files, never code."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

FOLDER_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken")
MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
"""Files of a further module."""

_MODULE = re.compile(r"\d+_\w+")


def is_module(folder: str) -> bool:
    """Return whether a folder beside a model's files is a further module of it (``1_Pooling``, ``2_Dense``), as
    sentence-transformers names them.
    """
    return _MODULE.fullmatch(folder) is not None


def belongs(path: PurePosixPath) -> bool:
    """Return whether a file is taken; ``path`` is below the model's folder."""
    if len(path.parts) == 2 and is_module(path.parent.name):
        return path.name in MODULE_FILES
    return len(path.parts) == 1 and path.suffix in FOLDER_SUFFIXES
