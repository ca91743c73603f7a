"""Reads HF configuration keys and remembers which ones were read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jackfield.errors import CheckpointError
from jackfield.interfaces.models import INERT_KEYS

FLOATS = ("Infinity", "-Infinity", "NaN")


class JsonConfigReader:
    """The :class:`~jackfield.interfaces.ConfigReader` over one json object.

    Args:
        config: the object.
        path: where it came from, for errors.
    """

    def __init__(self, config: Mapping[str, Any], path: str = "config.json") -> None:
        self._config = config
        self._path = path
        self._read: set[str] = set()
        self._sections: dict[str, JsonConfigReader] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default`` when it is absent or null."""
        self._read.add(key)
        value = _numbers(self._config.get(key))
        return default if value is None else value

    def require(self, key: str, type_: type) -> Any:
        """Return the value of ``key``.

        An int serves where a float is wanted; a bool never serves as a number.

        Raises:
            CheckpointError: the key is absent, or its value is of another type.
        """
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"the configuration lacks '{key}'", field=self._path, value=key, remedy=f"add '{key}' to the file"
            )
        if type_ is float and type(value) is int:
            return float(value)
        if not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool):
            raise CheckpointError(
                f"'{key}' must be {_word(type_)}, but is {_word(type(value))}",
                field=f"{self._path}: {key}",
                value=value,
                remedy="correct the value",
            )
        return value

    def ignore(self, *keys: str) -> None:
        """Say that these keys are known and do not matter here."""
        self._read.update(keys)

    def section(self, key: str) -> JsonConfigReader | None:
        """Return a reader of a nested object (the same one each time), or None when it is absent or null.

        Raises:
            CheckpointError: the value is no object.
        """
        self._read.add(key)
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise CheckpointError(
                f"'{key}' must be an object, but is {_word(type(value))}",
                field=f"{self._path}: {key}",
                value=value,
                remedy="correct the value",
            )
        if key not in self._sections:
            self._sections[key] = JsonConfigReader(value, f"{self._path}: {key}")
        return self._sections[key]

    def everything(self) -> Mapping[str, Any]:
        """Return all keys as they are; all of them count as read."""
        self._read.update(self._config)
        self._sections.clear()
        return self._config

    def unread(self) -> list[str]:
        """Return the keys that nobody read, nested ones as ``section.key``; without those that never matter and those
        that are null, false or empty.
        """
        return [key for key, _ in self._unread()]

    def finish(self, extra_allowed: Iterable[str] = ()) -> None:
        """Check that every key was read.

        Args:
            extra_allowed: dotted keys that may stay unread.

        Raises:
            CheckpointError: lists all keys that nobody read, with their values.
        """
        allowed = set(extra_allowed)
        left = {key: value for key, value in self._unread() if key not in allowed}
        if left:
            listing = ", ".join(f"{key} = {value!r}" for key, value in left.items())
            raise CheckpointError(
                f"nothing reads these keys of the configuration: {listing}",
                field=self._path,
                value=sorted(left),
                remedy="use a plugin that knows these keys; running without them could compute wrong results",
            )

    def _unread(self) -> Iterator[tuple[str, Any]]:
        for key, value in self._config.items():
            if key in self._sections:
                yield from ((f"{key}.{name}", inner) for name, inner in self._sections[key]._unread())
            elif key not in self._read and key not in INERT_KEYS and not _is_empty(value):
                yield key, value


def _is_empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _word(type_: type) -> str:
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", list: "a list"}
    return words.get(type_, "an object" if type_ is dict else type_.__name__)


def _numbers(value: Any) -> Any:
    """Return ``value`` with the numbers that JSON lacks: transformers writes ``{"__float__": "Infinity"}``."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, Mapping) and list(value) == ["__float__"] and value["__float__"] in FLOATS:
        return float(value["__float__"])
    return value
