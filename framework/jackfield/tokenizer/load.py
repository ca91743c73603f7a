"""Finds and loads the tokenizer of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jackfield.checkpoint import generation_defaults, read_gguf
from jackfield.checkpoint.locate import gguf_files, gguf_in_folder, read_json
from jackfield.errors import CheckpointError, ConfigError
from jackfield.interfaces.facts import ModelFacts
from jackfield.tokenizer.gguf_tokenizer import build_gguf_tokenizer
from jackfield.tokenizer.wrapper import Tokenizer

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_FILES = ("tokenizer.json", *SENTENCEPIECE, "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
"""The first line of a tiktoken file: a token in base64, and its rank. SentencePiece models are no text."""
_LIMIT = 256 << 20
"""Bytes of one tokenizer file; the largest take about 35 MB."""


def has_tokenizer(path: str | Path) -> bool:
    """Return whether there is a tokenizer in a GGUF file or a folder."""
    path = Path(path)
    return _in_folder(path) or bool(_ggufs(path))


def _in_folder(path: Path) -> bool:
    return path.is_dir() and (any((path / name).is_file() for name in _FILES) or any(path.glob("*.tiktoken")))


def _ggufs(path: Path) -> list[Path]:
    return gguf_files(path) if path.is_file() else gguf_in_folder(path)


def load_tokenizer(
    path: str | Path, facts: ModelFacts, *, mode: str = "auto", stops: Iterable[int] | None = None
) -> Tokenizer:
    """Return the tokenizer of the checkpoint at ``path``.

    Args:
        path: a GGUF file, or a folder with a tokenizer; usually ``facts.path``.
        facts: the checkpoint's facts; for GGUF the tokenizer is in the file, for folders they give the EOS ids.
        mode: as ``model.tokenizer_mode``.
        stops: ids that end a generation, besides the tokenizer's own; by default those of the checkpoint.

    Raises:
        CheckpointError: there is no tokenizer, or it cannot be read.
        ConfigError: the checkpoint has no tokenizer of that mode, or a library that it needs is not installed.
    """
    path = Path(path)
    ends = tuple(generation_defaults(facts).eos_token_ids if stops is None else stops)
    if _in_folder(path):
        _check_sizes(path)
        return _LOADERS[mode](path, ends)
    files = _ggufs(path)
    if not files:
        raise CheckpointError(
            "the folder holds no tokenizer",
            field="path",
            value=str(path),
            remedy=f"put one of {', '.join(_FILES)} into the folder, or name another tokenizer",
        )
    if mode not in ("auto", "fast"):
        raise _no_such(mode, path, "the tokenizer of a GGUF file is a fast one")
    return Tokenizer(build_gguf_tokenizer(read_gguf(files[0]).metadata, str(files[0])), ends)


def _auto(path: Path, stops: tuple[int, ...]) -> Tokenizer:
    if not (path / "tokenizer.json").is_file() and (path / "tekken.json").is_file():
        return _mistral(path, stops)
    return _fast(path, stops)


def _fast(path: Path, stops: tuple[int, ...]) -> Tokenizer:
    plain = _is_code(path)
    if not (path / "tokenizer.json").is_file():
        _check_convertible(path)
    hf = _from_pretrained(path, plain=plain)
    if not hf.is_fast:
        raise CheckpointError(
            f"the tokenizer {type(hf).__name__} has no fast form",
            field="path",
            value=str(path),
            remedy="convert it to a tokenizer.json, or set model.tokenizer_mode to slow for a SentencePiece model",
        )
    return Tokenizer(hf, stops)


def _slow(path: Path, stops: tuple[int, ...]) -> Tokenizer:
    file = next((path / name for name in SENTENCEPIECE if (path / name).is_file()), None)
    if file is None:
        raise _no_such("slow", path, f"it has none of {', '.join(SENTENCEPIECE)}")
    _need("sentencepiece", "sentencepiece", "slow")
    from jackfield.tokenizer.slow import SentencePieceTokenizer, load_sentencepiece

    return SentencePieceTokenizer(load_sentencepiece(file), stops)


def _mistral(path: Path, stops: tuple[int, ...]) -> Tokenizer:
    if not any((path / name).is_file() for name in ("tekken.json", *SENTENCEPIECE)):
        raise _no_such("mistral", path, "it has no tekken.json")
    _need("mistral_common", "mistral-common", "mistral")
    from jackfield.tokenizer.mistral import MistralTokenizer, load_mistral

    return MistralTokenizer(load_mistral(path), stops)


_LOADERS: dict[str, Callable[[Path, tuple[int, ...]], Tokenizer]] = {
    "auto": _auto,
    "fast": _fast,
    "slow": _slow,
    "mistral": _mistral,
}


def _from_pretrained(path: Path, *, plain: bool) -> Any:
    """Return transformers' tokenizer; with ``plain`` the tokenizer.json as it is, whatever class it was made for."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if plain:
            return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except BaseException as error:
        # Transformers raises whatever its readers raise; the tokenizers library panics on some damaged files.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _unreadable(path, error) from error


def _check_convertible(path: Path) -> None:
    """Check what transformers would convert: where it cannot, its errors name the wrong cause."""
    for file in (path / name for name in (*SENTENCEPIECE, "tiktoken.model") if (path / name).is_file()):
        with file.open("rb") as raw:
            tiktoken = _TIKTOKEN.match(raw.read(256)) is not None
        package = "tiktoken" if tiktoken else "sentencepiece"
        _need(package, package, "auto")
        if not tiktoken:
            from jackfield.tokenizer.slow import check_sentencepiece

            check_sentencepiece(file)


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError(
        f"the tokenizer cannot be loaded: {lines[0][:300]}",
        field="path",
        value=str(path),
        remedy="check the tokenizer files, or name another tokenizer",
    )


def _is_code(path: Path) -> bool:
    """Return whether the tokenizer's class is Python code of the checkpoint; refuse it where that is all there is."""
    file = path / "tokenizer_config.json"
    own = read_json(file).get("auto_map") if file.is_file() else None
    code = own.get("AutoTokenizer") if isinstance(own, dict) else None
    if code and not (path / "tokenizer.json").is_file():
        raise CheckpointError(
            "the tokenizer is Python code that comes with the checkpoint, which is not run",
            field=str(file),
            value=code,
            remedy="set model.tokenizer to a folder that holds the same tokenizer as tokenizer.json",
        )
    return bool(code)


def _check_sizes(path: Path) -> None:
    for file in path.iterdir():
        if file.suffix in (".json", ".txt", ".model", ".tiktoken") and file.stat().st_size > _LIMIT:
            raise CheckpointError(
                f"{file.name} is larger than any real tokenizer file",
                field="path",
                value=str(file),
                remedy="check which file this is",
            )


def _need(module: str, package: str, mode: str) -> None:
    if find_spec(module) is None:
        raise ConfigError(
            f"this tokenizer needs the package {package}, which is not installed",
            field="model.tokenizer_mode",
            value=mode,
            remedy=f"pip install {package}; or set model.tokenizer to a folder with a tokenizer.json",
        )


def _no_such(mode: str, path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the model has no tokenizer of that mode: {why}",
        field="model.tokenizer_mode",
        value=mode,
        remedy=f"leave model.tokenizer_mode out, or name another tokenizer than {path}",
    )
