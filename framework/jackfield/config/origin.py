"""Where values come from, and what is wrong with them: the records that the resolution pipeline passes around."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jackfield.errors import ConfigError

Path = tuple[str, ...]
"""A setting as tokens; map keys (layer patterns, plugin names) may contain dots."""

USER_SOURCES = frozenset({"cli", "env", "file", "api"})


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from.

    Args:
        source: ``cli``, ``env``, ``file``, ``api``, ``default``, ``proposal`` or ``derived``.
        where: the flag, the variable, ``file:line``, the argument, or the reason of a proposal or a derived value.
        binding: for proposals, whether the engine cannot run with another value.
    """

    source: str
    where: str = ""
    binding: bool = False

    @property
    def by_user(self) -> bool:
        """Whether a person set the value."""
        return self.source in USER_SOURCES

    def __str__(self) -> str:
        return f"{self.source}: {self.where}" if self.where else self.source


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was given, with its origin; a mapping holds further ``Given`` values."""

    value: Any
    origin: Origin

    def plain(self) -> Any:
        """Return the value without origins."""
        if isinstance(self.value, Mapping):
            return {key: part.plain() for key, part in self.value.items()}
        return self.value


def given(value: Any, origin: Origin) -> Given:
    """Wrap ``value``, and every value inside mappings, with one origin."""
    if isinstance(value, Mapping):
        return Given({str(key): given(part, origin) for key, part in value.items()}, origin)
    return Given(value, origin)


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the configuration tree that somebody set."""

    path: Path
    value: Any
    origin: Origin

    @property
    def name(self) -> str:
        """Dotted name."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the configuration.

    Args:
        field: dotted name of the setting, or the name as it was written when it is not one.
        message: what is wrong, without the name of the setting's origin.
        value: what was given. remedy: what to do. origin: who set it.
    """

    field: str
    message: str
    value: Any = None
    remedy: str = ""
    origin: Origin = DEFAULT

    def sentence(self) -> str:
        """Return the message with the place that is at fault."""
        return f"{self.message} ({self.origin})" if self.origin.by_user else self.message


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise one ConfigError that lists all problems; its field, value and remedy are the first one's.

    Raises:
        ConfigError: there is at least one problem.
    """
    found = list(problems)
    if not found:
        return
    first = found[0]
    if len(found) == 1:
        raise ConfigError(first.sentence(), field=first.field, value=first.value, remedy=first.remedy)
    lines = [f"{len(found)} settings are wrong:"]
    for problem in found:
        lines.append(f"- {problem.sentence()}" + (f"; {problem.remedy}" if problem.remedy else ""))
    raise ConfigError("\n  ".join(lines), field=first.field, value=first.value, remedy=first.remedy)
