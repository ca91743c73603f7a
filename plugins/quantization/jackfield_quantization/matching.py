"""Which layers a checkpoint's quantization leaves alone, and which it names. No torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

from jackfield.errors import ConfigError
from jackfield.interfaces import LayerInfo

REGEX = "re:"
"""What regular expressions begin with, in compressed-tensors and whoever follows it."""


def sources_of(info: LayerInfo) -> dict[str, str]:
    """Return the checkpoint module of each shard, by shard; the module's own name where none is known."""
    return {shard.name: info.sources.get(shard.name, info.name) for shard in info.shards}


def named(module: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns means the module or something that it lies in.

    A pattern is a regular expression behind ``re:``, a glob, or some of the parts of a module's path that follow one
    another: ``lm_head``, ``layers.0.mlp``, ``model.layers.3.self_attn.o_proj``.
    """
    return any(_means(pattern, module) for pattern in patterns)


def _means(pattern: str, module: str) -> bool:
    if pattern.startswith(REGEX):
        return re.match(compiled_source(pattern.removeprefix(REGEX)), module) is not None
    if any(letter in pattern for letter in "*?["):
        # A glob that ends with a star means the whole subtree; others a module, or what lies below it.
        return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}.*")
    return f".{pattern.strip('.')}." in f".{module}."


def compiled_source(expression: str) -> re.Pattern[str]:
    """Return a compiled regular expression.

    Raises:
        ConfigError: it is none.
    """
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigError(
            f"a regular expression of the quantization config cannot be read: {error}",
            field="quantization_config",
            value=expression,
            remedy="correct it in config.json",
        ) from None


def names_in(config: Mapping[str, object], *keys: str) -> tuple[str, ...]:
    """Return the names that stand under any of these keys of a quantization config.

    Raises:
        ConfigError: a value is no list of names.
    """
    found: list[str] = []
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
            raise wrong(key, value, "a list of module names")
        found += value
    return tuple(dict.fromkeys(found))


def wrong(key: str, value: object, wanted: str) -> ConfigError:
    """Return the error about a value that a quantization method does not know."""
    return ConfigError(
        f"quantization_config.{key} is not {wanted}",
        field=f"quantization_config.{key}",
        value=value,
        remedy=f"expected {wanted}; is the checkpoint written by a newer tool than this engine knows?",
    )


def integer(config: Mapping[str, object], key: str, default: int, known: Iterable[int] = ()) -> int:
    """Return a whole number of a quantization config.

    Raises:
        ConfigError: it is none, or not one of ``known``.
    """
    value = config.get(key)
    value, choices = default if value is None else value, tuple(known)
    if isinstance(value, bool) or not isinstance(value, int) or (choices and value not in choices):
        raise wrong(key, value, f"one of {', '.join(map(str, choices))}" if choices else "a whole number")
    return value
