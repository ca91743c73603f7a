"""Log lines: text and JSON, request ids, secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from asgi import ask, hello, run, with_calls

from jackfield.config import EngineConfig, load_config
from jackfield.server.operations.calls import Call, Generation, current_call
from jackfield.server.operations.logs import log_call, logging_to

SERVER = logging.getLogger("jackfield.server")


def config(**settings: Any) -> EngineConfig:
    return load_config(env={}, api=settings)


def lines(form: str, secrets: tuple[str, ...] = (), **settings: Any) -> Iterator[Any]:
    """Yield a stream to look at; records are written to it until the test goes on."""
    stream = io.StringIO()
    with logging_to(stream, config(server={"log_format": form}, **settings), secrets):
        yield stream


@pytest.fixture
def json_lines() -> Iterator[io.StringIO]:
    yield from lines("json", ("sk-secret", "sk-secret-longer"))


@pytest.fixture
def text_lines() -> Iterator[io.StringIO]:
    yield from lines("text", ("sk-secret",))


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_holds_message_fields_and_exception(json_lines: io.StringIO) -> None:
    SERVER.info("hello %s", "wor\nld", extra={"fields": {"port": 80}})
    try:
        raise ValueError("bad")
    except ValueError:
        SERVER.exception("failed")
    first, second = records(json_lines)
    assert first.pop("time").endswith("+00:00")
    assert first == {"level": "info", "logger": "jackfield.server", "message": "hello wor\nld", "port": 80}
    assert second["level"] == "error"
    assert second["exception"].endswith("ValueError: bad\n")


def test_lines_of_a_request_carry_its_id(json_lines: io.StringIO) -> None:
    token = current_call.set(Call("r-17", "GET", "/", 0.0, 0))
    SERVER.info("inside")
    current_call.reset(token)
    SERVER.info("outside")
    assert [record.get("request_id") for record in records(json_lines)] == ["r-17", None]


def test_secrets_are_hidden_wherever_they_come_from(json_lines: io.StringIO) -> None:
    SERVER.info("key %s and sk-secret-longer", "sk-secret", extra={"fields": {"header": "Bearer sk-secret"}})
    try:
        raise ValueError("sk-secret")
    except ValueError:
        SERVER.exception("failed")
    assert "sk-secret" not in json_lines.getvalue()
    assert records(json_lines)[0]["message"] == "key [secret] and [secret]"


def test_a_text_line_is_one_line_whatever_it_holds(text_lines: io.StringIO) -> None:
    SERVER.info("path /a\nFAKE\x1b[31m sk-secret", extra={"fields": {"route": "two words", "status": 200}})
    text = text_lines.getvalue()
    assert text.count("\n") == 1
    assert text.endswith(
        r' INFO jackfield.server: path /a\x0aFAKE\x1b[31m [secret] route="two words" status=200' + "\n"
    )


def test_the_server_tells_from_info_unless_a_level_is_set() -> None:
    levels: list[tuple[dict[str, Any], list[bool]]] = [
        ({}, [False, True]),
        ({"log": {"level": "warning"}}, [False, False]),
    ]
    for settings, expected in levels:
        for stream in lines("json", **settings):
            logging.getLogger("jackfield.engine").info("engine")
            SERVER.info("server")
            told = stream.getvalue()
            assert ["engine" in told, '"server"' in told] == expected


def test_logging_is_as_before_afterwards() -> None:
    logger = logging.getLogger("jackfield")
    before = (logger.level, list(logger.handlers), logger.propagate, SERVER.level)
    for _ in lines("json"):
        assert logger.propagate is False
    assert (logger.level, logger.handlers, logger.propagate, SERVER.level) == before


def test_a_call_is_one_line(json_lines: io.StringIO) -> None:
    app, _ = with_calls(hello, log_call)
    headers = {"x-request-id": "r1", "authorization": "Bearer sk-secret"}
    run(ask(app, "/v1/some%0Athing", headers=headers, extra={"query_string": b"key=sk-secret"}))
    (record,) = records(json_lines)
    assert 0 <= record.pop("duration_ms") < 5000
    assert record.pop("time")
    assert record == {
        "level": "info",
        "logger": "jackfield.server.access",
        "message": "POST /v1/some%0Athing",
        "request_id": "r1",
        "route": "-",
        "status": 200,
        "client": "192.0.2.1",
    }


def test_tokens_and_departure_are_told(json_lines: io.StringIO) -> None:
    call = Call("r", "POST", "/v1/completions", 0.0, 0, left=True, duration=0.25)
    call.generations = [Generation(1, 5, 1.0, 1.0, prompt_tokens=4, _counts={0: 3, 1: 2})]
    log_call(call)
    (record,) = records(json_lines)
    told = {
        name: record[name] for name in ("status", "duration_ms", "prompt_tokens", "generation_tokens", "client_left")
    }
    assert told == {
        "status": 499,
        "duration_ms": 250.0,
        "prompt_tokens": 4,
        "generation_tokens": 5,
        "client_left": True,
    }


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [("/health", 200, None), ("/health", 503, "warning"), ("/v1/x", 404, "info"), ("/v1/x", 500, "warning")],
)
def test_probes_are_quiet_and_server_errors_loud(
    json_lines: io.StringIO, path: str, status: int, level: str | None
) -> None:
    log_call(Call("r", "GET", path, 0.0, 0, status=status))
    assert [record["level"] for record in records(json_lines)] == ([] if level is None else [level])
