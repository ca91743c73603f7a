"""API keys: who gets in, and what is told to those who do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from asgi import Exchange, ask, hello, run

from jackfield.config import ServerSection
from jackfield.errors import ConfigError
from jackfield.server.operations.keys import OPEN_PATHS, ApiKeys, read_keys

KEYS = ("sk-first", "sk-second")
APP = ApiKeys(hello, KEYS)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-first"},
        {"Authorization": "bearer  sk-second"},
        {"x-api-key": "sk-second"},
        {"authorization": "Bearer wrong", "x-api-key": "sk-first"},
    ],
)
def test_each_key_opens_in_both_headers(headers: dict[str, str]) -> None:
    assert run(ask(APP, headers=headers)).body == b"hello"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "sk-first"},
        {"authorization": "Basic sk-first"},
        {"authorization": "Bearer sk-firs"},
        {"authorization": "Bearer sk-first2"},
        {"x-api-key": ""},
        {"x-api-key": "SK-FIRST"},
        {"api-key": "sk-first"},
    ],
)
def test_nothing_else_opens(headers: dict[str, str]) -> None:
    answer = run(ask(APP, headers=headers))
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.error() == {
        "message": "a valid API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }


def test_the_answer_has_the_shape_of_the_path() -> None:
    answer = run(ask(APP, "/v1/messages"))
    assert answer.status == 401
    assert answer.error()["type"] == "authentication_error"
    assert b'"type":"error"' in answer.body


def test_open_paths_need_no_key() -> None:
    assert frozenset({"/", "/health", "/ready", "/version", "/metrics"}) == OPEN_PATHS
    assert {run(ask(APP, path, method="GET")).status for path in OPEN_PATHS} == {200}


@pytest.mark.parametrize("path", ["/health/", "//health", "/health/x", "/v1/../health", "/docs", "/openapi.json"])
def test_only_exactly_these_paths_are_open(path: str) -> None:
    assert run(ask(APP, path, method="GET")).status == 401


def test_a_prefix_of_a_proxy_is_no_part_of_the_path() -> None:
    opened = run(ask(APP, "/llm/health", extra={"root_path": "/llm"}))
    closed = run(ask(APP, "/llm/v1/models", extra={"root_path": "/llm"}))
    assert (opened.status, closed.status) == (200, 401)


def test_a_web_socket_without_a_key_is_closed() -> None:
    async def first_message() -> object:
        async with Exchange(APP, "/v1/realtime", extra={"type": "websocket"}) as exchange:
            return await exchange.next()

    assert run(first_message())["type"] == "websocket.close"  # type: ignore[index]


def test_keys_come_from_settings_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the office\nsk-one\n\n  sk-two  \n")
    assert read_keys(ServerSection(api_key=("sk-own",), api_key_file=str(file))) == ("sk-own", "sk-one", "sk-two")
    assert read_keys(ServerSection()) == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the file of API keys cannot be read: No such file or directory"),
        (b"\xff\xfe\x00", "the file of API keys cannot be read: it is no UTF-8 text"),
        (b"# nothing\n\n", "the file of API keys holds no key"),
        (
            b"good\nsecret with spaces\ngood\nna\xc3\xafve\n",
            "an API key is 1 to 4096 visible ASCII characters; this does not hold for number 2, 4",
        ),
    ],
)
def test_a_bad_key_file_is_an_error(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_keys(ServerSection(api_key_file=str(file)))
    assert (caught.value.message, caught.value.field) == (message, "server.api_key_file")
    assert "secret" not in str(caught.value)


def test_a_bad_key_of_the_settings_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(ServerSection(api_key=("fine", "hidden word")))
    assert caught.value.field == "server.api_key"
    assert "number 2" in caught.value.message
    assert "hidden" not in str(caught.value)
