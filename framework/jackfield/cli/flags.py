"""Engine flags: every setting of the configuration as a flag, taken out of a command line before it is parsed.

``--max-model-len 4096``, ``--no-enable-prefix-caching``, ``--attention.kinds.sliding.force NAME``,
``--plugins.options.NAME.KEY VALUE``, ``--config FILE``. Which flags exist follows from the configuration's schema.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jackfield.errors import ConfigError, did_you_mean

_LEFT_TO_COMMANDS = frozenset({"model", "help", "version"})
_TRUTH = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


@dataclass(slots=True)
class EngineFlags:
    """What the command line says about the engine: settings as :func:`jackfield.config.load_config` takes them, and
    the configuration file.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None

    def config(self, model: str | None = None) -> Any:
        """Return the resolved EngineConfig, with ``model`` as the command's argument."""
        from jackfield.config import load_config

        settings = {**self.settings, **({"model": model} if model is not None else {})}
        return load_config(cli=settings, file=self.file)


def extract(tokens: Sequence[str]) -> tuple[list[str], EngineFlags]:
    """Return the tokens that are no engine flags, and the engine flags.

    Raises:
        ConfigError: a flag lacks its value.
    """
    flags, queue = EngineFlags(), list(tokens)
    rest: list[str] = []
    while queue:
        token = queue.pop(0)
        if token == "--":
            return [*rest, token, *queue], flags
        if not (token.startswith("--") and _take(token[2:], queue, flags)):
            rest.append(token)
    return rest, flags


def _take(text: str, queue: list[str], flags: EngineFlags) -> bool:
    name, equals, value = text.partition("=")
    if name == "config":
        flags.file = Path(value if equals else _next(name, queue))
        return True
    setting, annotation = _setting(name)
    if setting is None:
        return _take_negative(name, equals, flags)
    from jackfield.config.values import is_bool

    if equals:
        _store(flags, setting, annotation, value)
    elif is_bool(annotation):
        _store(flags, setting, annotation, queue.pop(0) if queue and queue[0].lower() in _TRUTH else True)
    else:
        _store(flags, setting, annotation, _next(name, queue))
    return True


def _take_negative(name: str, equals: str, flags: EngineFlags) -> bool:
    from jackfield.config.values import is_bool

    if equals or not name.startswith("no-"):
        return False
    setting, annotation = _setting(name.removeprefix("no-"))
    if setting is None or not is_bool(annotation):
        return False
    flags.settings[setting] = False
    return True


def _setting(name: str) -> tuple[str | None, Any]:
    from jackfield.config.collect import lookup
    from jackfield.config.origin import Problem
    from jackfield.config.schema import annotation_at

    if name in _LEFT_TO_COMMANDS:
        return None, None
    path = lookup(name)
    if isinstance(path, Problem):
        return (name, None) if _explains(name) else (None, None)
    return name if "." in name else name.replace("-", "_"), annotation_at(path)


def _explains(name: str) -> bool:
    from jackfield.config.renamed import table
    from jackfield.config.tree import ConfigTree

    return name.replace("-", "_") in table() or name.partition(".")[0] in ConfigTree.model_fields


def _next(name: str, queue: list[str]) -> str:
    if not queue or re.match(r"--[a-zA-Z]", queue[0]):
        from jackfield.config.renamed import table

        if name.replace("-", "_") in table():
            return ""
        raise ConfigError(f"--{name} needs a value", field=f"--{name}", remedy=f"write --{name} VALUE")
    return queue.pop(0)


def _store(flags: EngineFlags, setting: str, annotation: Any, value: Any) -> None:
    from jackfield.config.values import is_tuple

    earlier = flags.settings.get(setting)
    if is_tuple(annotation) and earlier is not None:
        value = f"{earlier},{value}"
    flags.settings[setting] = value


def flag_names() -> list[str]:
    """Return all engine flags, in the order of the schema. Below a map (``--attention.kinds.*``) names are free."""
    from jackfield.config.schema import Kind, kind_of, leaves
    from jackfield.config.values import is_bool

    names = ["--config"]
    for leaf in leaves():
        flag = "--" + (leaf.flat or ".".join(leaf.path)).replace("_", "-")
        names.append(flag if kind_of(leaf.annotation) in (Kind.LEAF, Kind.OPEN) else f"{flag}.NAME")
        if is_bool(leaf.annotation):
            names.append("--no-" + flag.removeprefix("--"))
    return [name for name in names if name != "--model"]


def suggest(message: str, tokens: Sequence[str]) -> str:
    """Return a remedy for an unknown flag that a parser's message names, or ``""``."""
    unknown = next((token.partition("=")[0] for token in tokens if token.startswith("--") and token in message), "")
    if not unknown:
        return ""
    return did_you_mean(unknown, flag_names())


def flags_help() -> str:
    """Return the engine flags with their help, for the end of a command's help text."""
    return "\n".join(("Engine flags (all settings; see also `jackfield config show`)", *_help()))


def _help() -> Iterator[str]:
    from jackfield.config.schema import leaves
    from jackfield.config.tree import ConfigTree
    from jackfield.config.values import type_words

    yield ""
    yield "  --config FILE"
    yield "      YAML file of settings."
    for section, info in ConfigTree.model_fields.items():
        yield ""
        yield f"{section}: {info.description}"
        for leaf in leaves():
            if leaf.path[0] != section or leaf.path == ("model", "model"):
                continue
            flag = "--" + (leaf.flat or ".".join(leaf.path)).replace("_", "-")
            yield f"  {flag} {type_words(leaf.annotation)}"
            yield textwrap.fill(leaf.help, 78, initial_indent=" " * 6, subsequent_indent=" " * 6)
