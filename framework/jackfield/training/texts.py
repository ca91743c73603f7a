"""Documents from a file, and pieces of them in tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from jackfield.errors import ConfigError
from jackfield.tokenizer import Tokenizer

Document = str | list[int]
"""A text, or its tokens."""
Piece = npt.NDArray[np.int32]
FEWEST = 3
"""Tokens of a piece that drafts can be made in: one to begin with, the next, and the one that is drafted."""
_MOST_SHOWN = 10
_LAYOUT = 'a line is {"text": "..."} or {"token_ids": [...]}, or all lines are plain texts'


def read_documents(path: Path) -> list[Document]:
    """Return the documents of a file: lines of JSON objects with ``text`` or ``token_ids`` (other fields are left
    alone), or lines of plain text. Which of both, the first line says, or the name's ending ``.jsonl``. Empty lines and
    empty texts are no documents.

    Raises:
        ConfigError: the file cannot be read, lines are wrong (they are named), or there is no document.
    """
    try:
        lines = [line for line in path.expanduser().read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, f"it cannot be read: {error}", "name a text file") from error
    documents = list(_objects(lines, path)) if _is_json(path, lines) else list(lines)
    documents = [document for document in documents if document]
    if not documents:
        raise _wrong(path, "it holds no document", _LAYOUT)
    return documents


def pieces_of(
    documents: Sequence[Document], tokenizer: Tokenizer | None, vocab_size: int, length: int, path: Path
) -> list[list[Piece]]:
    """Return each document's tokens, in pieces of ``length`` at most. Pieces that are too short to draft in are left
    out, and documents without any other.

    Args:
        tokenizer: for texts; None where there are none.

    Raises:
        ConfigError: a token is none of the target's, or nothing is left.
    """
    cut = []
    for number, document in enumerate(documents, 1):
        ids = np.array(_ids(document, tokenizer), dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            text = f"document {number} has a token that is none of the target's {vocab_size}"
            raise _wrong(path, text, "use ids of the target's tokenizer")
        parts = [ids[at : at + length].astype(np.int32) for at in range(0, len(ids), length)]
        parts = [part for part in parts if len(part) >= FEWEST]
        cut += [parts] if parts else []
    if not cut:
        raise _wrong(path, f"no document has {FEWEST} tokens", "name a file with longer texts")
    return cut


def split(documents: Sequence[list[Piece]], holdout: float, seed: int, path: Path) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces to learn from, and those to measure on: of a share of the documents, at least one.

    Raises:
        ConfigError: there is one document only.
    """
    count = max(1, round(len(documents) * holdout)) if holdout else 0
    if count >= len(documents):
        raise _wrong(path, "it has too few documents to hold one out", "name more, or use --holdout 0")
    order = np.random.default_rng(seed).permutation(len(documents))
    held, learnt = order[:count], order[count:]
    return [p for at in learnt for p in documents[at]], [p for at in held for p in documents[at]]


def _ids(document: Document, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(document, list):
        return document
    assert tokenizer is not None, "texts need a tokenizer"
    return tokenizer.encode(document)


def _is_json(path: Path, lines: Sequence[str]) -> bool:
    if path.suffix == ".jsonl" or not lines:
        return path.suffix == ".jsonl"
    try:
        return isinstance(msgspec.json.decode(lines[0]), Mapping)
    except msgspec.DecodeError:
        return False


def _objects(lines: Sequence[str], path: Path) -> Iterator[Document]:
    faults = []
    for number, line in enumerate(lines, 1):
        document, fault = _document(line)
        faults += [f"document {number}: {fault}"] if fault else []
        yield document
    if faults:
        more = [f"and {len(faults) - _MOST_SHOWN} more"] if len(faults) > _MOST_SHOWN else []
        raise _wrong(path, "; ".join([*faults[:_MOST_SHOWN], *more]), _LAYOUT)


def _document(line: str) -> tuple[Document, str]:
    """Return a document and "", or something and what is wrong."""
    try:
        entry: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        return "", f"no JSON: {error}"
    if not isinstance(entry, Mapping):
        return "", "no JSON object"
    if ("text" in entry) == ("token_ids" in entry):
        return "", "either text or token_ids is needed"
    text, ids = entry.get("text", ""), entry.get("token_ids", [])
    if not isinstance(text, str):
        return "", "text is no text"
    if not isinstance(ids, list) or any(type(one) is not int or not 0 <= one < 1 << 31 for one in ids):
        return "", "token_ids is no list of whole numbers"
    return text or ids, ""


def _wrong(path: Path, text: str, remedy: str) -> ConfigError:
    return ConfigError(f"the text to train on is wrong: {text}", field="--text", value=str(path), remedy=remedy)
