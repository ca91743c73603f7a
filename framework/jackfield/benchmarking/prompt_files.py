"""Prompts from files: conversations in ShareGPT's layout, and lines of JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jackfield.benchmarking.prompts import Sample
from jackfield.errors import ConfigError

_MOST_SHOWN = 20


def read_prompts(path: Path, count: int | None, output_len: int | None) -> list[Sample]:
    """Return the prompts of a file with one JSON object on each line: ``{"prompt": text or ids}`` or
    ``{"messages": [...]}``, with ``max_tokens`` where wanted, which ``output_len`` replaces. Empty lines do not count.

    Args:
        count: how many to take, from the beginning; all when None.

    Raises:
        ConfigError: the file cannot be read, lines are wrong (all are named), or it has fewer prompts than wanted.
    """
    samples, faults = [], []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            sample, fault = _prompt_line(line, output_len)
            samples.append(sample)
            faults += [f"line {number}: {fault}"] if fault else []
    if faults:
        raise _wrong(path, "; ".join(_shown(faults)), 'a line is {"prompt": ...} or {"messages": [...]}')
    return _enough(samples, count, path)


def read_conversations(path: Path) -> list[tuple[str, str]]:
    """Return the first question and the first answer of each conversation in a file of ShareGPT's layout: a list of
    ``{"conversations": [{"from": ..., "value": ...}, ...]}``. Conversations of one turn are left out.

    Raises:
        ConfigError: the file cannot be read, or is no such list.
    """
    try:
        data = msgspec.json.decode(_text(path))
        turns = [[turn["value"] for turn in entry["conversations"][:2]] for entry in data]
        pairs = [(str(turn[0]), str(turn[1])) for turn in turns if len(turn) == 2]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        text = f"it is not in ShareGPT's layout: {type(error).__name__}: {error}"
        layout = 'it must be a list of {"conversations": [{"from": ..., "value": ...}, ...]}'
        raise _wrong(path, text, layout) from error
    return pairs


def choose(pairs: list[tuple[str, str]], count: int | None, seed: int, path: Path) -> list[tuple[str, str]]:
    """Return ``count`` of the conversations in random order; all when None.

    Raises:
        ConfigError: there are fewer.
    """
    order = np.random.default_rng(seed).permutation(len(pairs))
    return _enough([pairs[place] for place in order], count, path)


def _enough(found: list[Any], count: int | None, path: Path) -> list[Any]:
    if not found:
        raise _wrong(path, "it holds no prompt", "name a file with prompts")
    if count is not None and count > len(found):
        raise _wrong(path, f"it holds {len(found)} prompts, fewer than {count}", f"write --num-prompts {len(found)}")
    return found if count is None else found[:count]


def _prompt_line(line: str, output_len: int | None) -> tuple[Sample, str]:
    """Return a prompt and "", or something and what is wrong."""
    try:
        entry = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        return Sample(None), f"no JSON: {error}"
    faults = list(_faults(entry))
    if faults:
        return Sample(None), ", ".join(faults)
    wanted = entry.get("max_tokens") if output_len is None else output_len
    return Sample(entry.get("prompt"), entry.get("messages"), wanted), ""


def _faults(entry: Any) -> Iterator[str]:
    if not isinstance(entry, Mapping):
        yield "no JSON object"
        return
    yield from (f"unknown field '{name}'" for name in entry if name not in ("prompt", "messages", "max_tokens"))
    if ("prompt" in entry) == ("messages" in entry):
        yield "either prompt or messages is needed"
    if not _is_prompt(entry.get("prompt", "-")):
        yield "prompt is neither a text nor a list of token ids"
    messages = entry.get("messages", [{}])
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        yield "messages is no list of objects"
    limit = entry.get("max_tokens", 1)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        yield "max_tokens is no positive number"


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _text(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, f"it cannot be read: {error}", "name a text file") from error


def _shown(faults: list[str]) -> list[str]:
    more = len(faults) - _MOST_SHOWN
    return faults if more <= 0 else [*faults[:_MOST_SHOWN], f"and {more} more"]


def _wrong(path: Path, text: str, remedy: str) -> ConfigError:
    return ConfigError(f"the data set is wrong: {text}", field="--dataset-path", value=str(path), remedy=remedy)
