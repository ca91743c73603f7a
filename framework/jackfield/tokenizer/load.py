"""Finds and loads the tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.checkpoint import generation_defaults, read_gguf
from jackfield.checkpoint.locate import gguf_files, gguf_in_folder
from jackfield.errors import CheckpointError
from jackfield.interfaces.facts import ModelFacts
from jackfield.tokenizer.gguf_tokenizer import build_gguf_tokenizer
from jackfield.tokenizer.wrapper import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(path: str | Path, facts: ModelFacts) -> Tokenizer:
    """Return the tokenizer of the checkpoint at ``path``.

    Args:
        path: a GGUF file, or a folder with a tokenizer; usually ``facts.path``.
        facts: the checkpoint's facts; for GGUF the tokenizer is in the file, for folders they give the EOS ids.

    Raises:
        CheckpointError: there is no tokenizer, or it cannot be read.
    """
    path = Path(path)
    stops = generation_defaults(facts).eos_token_ids
    if path.is_dir() and any((path / name).is_file() for name in _FILES):
        return Tokenizer(_from_folder(path), stops)
    files = gguf_files(path) if path.is_file() else gguf_in_folder(path)
    if not files:
        raise CheckpointError(
            "the folder holds no tokenizer",
            field="path",
            value=str(path),
            remedy=f"put one of {', '.join(_FILES)} into the folder, or name another tokenizer",
        )
    return Tokenizer(build_gguf_tokenizer(read_gguf(files[0]).metadata, str(files[0])), stops)


def _from_folder(path: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    try:
        hf: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises whatever its readers raise
        raise CheckpointError(
            f"the tokenizer cannot be loaded: {error}",
            field="path",
            value=str(path),
            remedy="check the tokenizer files, or name another tokenizer",
        ) from error
    if not hf.is_fast:
        raise CheckpointError(
            f"the tokenizer {type(hf).__name__} has no fast form",
            field="path",
            value=str(path),
            remedy="convert it to a tokenizer.json",
        )
    return hf
