from __future__ import annotations

import pytest

from jackfield.checkpoint import JsonConfigReader
from jackfield.errors import CheckpointError
from jackfield.interfaces import ConfigReader


def test_reading_marks_keys() -> None:
    config = {"a": 1, "b": None, "c": "x", "d": {"e": 2, "f": 3}, "g": [1], "model_type": "m", "h": False, "i": []}
    reader = JsonConfigReader(config)
    protocol: ConfigReader = reader
    assert protocol.get("a") == 1
    assert reader.get("b", 7) == 7
    assert reader.get("absent", 8) == 8
    assert reader.unread() == ["c", "d", "g"]
    section = reader.section("d")
    assert section is not None
    assert section.get("e") == 2
    assert reader.section("d") is section
    assert reader.unread() == ["c", "d.f", "g"]
    reader.ignore("c", "g")
    section.ignore("f")
    assert reader.unread() == []
    reader.finish()


def test_zero_is_a_value() -> None:
    assert JsonConfigReader({"a": 0, "b": 0.0, "c": "", "d": {}, "e": None}).unread() == ["a", "b"]


def test_an_object_read_whole_is_read() -> None:
    reader = JsonConfigReader({"d": {"e": 2}})
    assert reader.get("d") == {"e": 2}
    assert reader.unread() == []
    assert reader.section("absent") is None


def test_finish_lists_everything() -> None:
    reader = JsonConfigReader({"a": 1, "b": "x", "c": 2}, path="m/config.json")
    with pytest.raises(CheckpointError) as caught:
        reader.finish(extra_allowed=["c"])
    assert caught.value.message == "nothing reads these keys of the configuration: a = 1, b = 'x'"
    assert (caught.value.field, caught.value.value) == ("m/config.json", ["a", "b"])


def test_require() -> None:
    reader = JsonConfigReader({"n": 3, "x": 1.5, "t": True, "s": "v"})
    assert reader.require("n", int) == 3
    value = reader.require("n", float)
    assert value == 3.0
    assert type(value) is float
    assert reader.require("t", bool) is True
    assert reader.require("s", str) == "v"


@pytest.mark.parametrize(
    ("key", "type_", "message"),
    [
        ("absent", int, "the configuration lacks 'absent'"),
        ("null", int, "the configuration lacks 'null'"),
        ("x", int, "'x' must be a whole number, but is a number"),
        ("t", int, "'t' must be a whole number, but is true or false"),
        ("t", float, "'t' must be a number, but is true or false"),
        ("x", str, "'x' must be a string, but is a number"),
    ],
)
def test_require_refuses(key: str, type_: type, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        JsonConfigReader({"x": 1.5, "t": True, "null": None}).require(key, type_)
    assert caught.value.message == message


def test_a_section_must_be_an_object() -> None:
    with pytest.raises(CheckpointError, match="'a' must be an object, but is a list"):
        JsonConfigReader({"a": [1]}).section("a")


def test_everything_counts_as_read() -> None:
    reader = JsonConfigReader({"size": 4, "rope": {"theta": 1.0}})
    reader.section("rope")
    assert reader.unread() == ["size", "rope.theta"]
    assert reader.everything() == {"size": 4, "rope": {"theta": 1.0}}
    assert reader.unread() == []
    reader.finish()
