"""Parses json that a stranger wrote: no key twice, no NaN, and memory in proportion to what real files need."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

MAX_BRACKETS = 1 << 19
MAX_COMMAS = 1 << 21
"""A checkpoint of 250 thousand tensors, in a safetensors header or an index, has fewer. Each bracket and each comma
may cost about 100 bytes of memory, whatever it takes in the file.
"""


def parse_json(raw: bytes, *, infinity: bool = False) -> Any:
    """Return the value of a json text.

    Args:
        raw: UTF-8 text. infinity: allow ``Infinity``, which json lacks and the configuration of some models has.

    Raises:
        ValueError: the text is no json, is nested too deeply, holds a key twice, or more values than any real file.
    """
    brackets, commas = raw.count(b"[") + raw.count(b"{"), raw.count(b",")
    if brackets > MAX_BRACKETS or commas > MAX_COMMAS:
        raise ValueError(f"{brackets} brackets and {commas} commas are more than any real file has")
    try:
        return json.loads(raw, object_pairs_hook=_unique, parse_constant=_constant if infinity else _refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"these names occur twice: {', '.join(twice[:10])}")
    return result


def _refused(word: str) -> NoReturn:
    raise ValueError(f"{word} is no json number")


def _constant(word: str) -> float:
    return _refused(word) if word == "NaN" else float(word)
