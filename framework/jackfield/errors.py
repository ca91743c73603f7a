"""Every error that Jackfield raises on purpose: typed, with the field, its value and a remedy.

An error that a user can cause derives from :class:`JackfieldError`; the command line turns it into exit code 2 and
three lines of text. Plain
``AssertionError`` is kept for broken internal invariants.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class JackfieldError(Exception):
    """Base of all typed errors.

    Args:
        message: what is wrong, in one sentence.
        field: the setting, file, tensor or request field that is at fault (``cache.block_size``), or ``None``.
        value: the offending value; shown with ``repr`` and cut at 200 characters.
        remedy: what to do about it, or ``""``.
    """

    def __init__(self, message: str, *, field: str | None = None, value: object = None, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.message]
        if self.field is not None:
            parts.append(f"field: {self.field} = {_shorten(repr(self.value))}")
        if self.remedy:
            parts.append(f"remedy: {self.remedy}")
        return "\n  ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.field, self.value, self.remedy)


def _rebuild(cls: type[JackfieldError], message: str, field: str | None, value: object, remedy: str) -> JackfieldError:
    error = cls.__new__(cls)
    JackfieldError.__init__(error, message, field=field, value=value, remedy=remedy)
    return error


class ConfigError(JackfieldError):
    """A setting is unknown, has a wrong value, or contradicts another one."""


class ModelNotFoundError(ConfigError):
    """The model that was named does not exist where it was looked for."""


class CheckpointError(JackfieldError):
    """A checkpoint file is missing, truncated, corrupt, or holds something that nothing uses."""


class PluginError(JackfieldError):
    """A plugin could not be found, loaded or used."""


class NoCandidateError(JackfieldError):
    """The oracle found no plugin that fits a need; ``table`` is the rendered decision."""

    def __init__(
        self, message: str, *, field: str | None = None, value: object = None, remedy: str = "", table: str = ""
    ) -> None:
        super().__init__(message, field=field, value=value, remedy=remedy)
        self.table = table

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n{self.table}" if self.table else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_no_candidate, (self.message, self.field, self.value, self.remedy, self.table)


def _rebuild_no_candidate(message: str, field: str | None, value: object, remedy: str, table: str) -> NoCandidateError:
    return NoCandidateError(message, field=field, value=value, remedy=remedy, table=table)


class RequestError(JackfieldError):
    """A request is invalid; the engine goes on with the others."""


class EngineDeadError(JackfieldError):
    """The engine stopped because of an internal error; no further request can be served."""


MUCH = 0.15
"""How much less alike, out of 1, a name may be than the closest one and still be named."""


def did_you_mean(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Return ``"did you mean 'a' or 'b'?"`` for the closest known names, or ``""`` when none is close. Names that are
    much further away than the closest one are left out.
    """
    close = difflib.get_close_matches(name, sorted(known), n=limit, cutoff=0.6)
    if not close:
        return ""
    best = _likeness(name, close[0])
    close = [other for other in close if _likeness(name, other) >= best - MUCH]
    return "did you mean " + " or ".join(f"'{c}'" for c in close) + "?"


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, name).ratio()


def _shorten(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
