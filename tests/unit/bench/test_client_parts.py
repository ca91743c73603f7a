"""Parts of the client that need no server: addresses, keys, errors, and events out of bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.client.address import Address, parse_address
from jackfield.client.connection import Connection
from jackfield.client.errors import AnswerError, BrokenAnswerError, answer_error, seconds, unreachable
from jackfield.client.events import decode
from jackfield.client.lines import EventLines
from jackfield.config import load_config
from jackfield.config.environment import client_key
from jackfield.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:8000", Address("http://h:8000", "h", 8000)),
        ("http://h:8000/v1/", Address("http://h:8000", "h", 8000)),
        ("https://h/llm/v1", Address("https://h/llm", "h", 443, "/llm", tls=True)),
        ("http://[::1]:80", Address("http://[::1]:80", "::1", 80)),
        ("unix:/run/jf.sock", Address("http://localhost", "localhost", 80, socket="/run/jf.sock")),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert parse_address(url) == address


def test_servers_on_this_machine_are_known() -> None:
    local = ("http://localhost:1", "http://127.0.0.1", "http://[::1]:3", "unix:x")
    assert [parse_address(url).local for url in (*local, "http://example.org")] == [True, True, True, True, False]
    assert parse_address("http://h:8000/v1").authority == "h:8000"


@pytest.mark.parametrize(
    "url", ["h:8000", "ftp://h", "http://", "http://h:x", "http://h?a=1", "http://u:p@h", "unix:", ""]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(url)
    assert (caught.value.field, caught.value.value) == ("--url", url)


@pytest.mark.parametrize("key", ["", "schlüssel", "a\nb"])
def test_keys_that_fit_into_no_header_are_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        Connection("http://h", api_key=key)
    assert caught.value.value == "..."


def test_the_key_in_the_environment_is_for_servers_and_their_clients() -> None:
    environment = {"JACKFIELD_API_KEY": "sk,1"}
    assert client_key(environment) == "sk,1"
    config = load_config(env=environment)
    assert config.server.api_key == ("sk,1",)
    assert str(config.origin("server.api_key")) == "env: JACKFIELD_API_KEY"
    both = load_config(env={**environment, "JACKFIELD_SERVER__API_KEY": "other"})
    assert both.server.api_key == ("other",)
    assert client_key({}) is None and client_key({"JACKFIELD_API_KEY": ""}) is None
    assert load_config(env={"JACKFIELD_API_KEY": ""}).server.api_key == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "type": "x"}}', "HTTP 400: too long"),
        (b'{"error": "plain"}', "HTTP 400: plain"),
        (b'{"detail": "Not Found"}', "HTTP 400: Not Found"),
        (b"<html>", "HTTP 400: <html>"),
        (b"", "HTTP 400: no text"),
        (b"[1]", "HTTP 400: [1]"),
    ],
)
def test_errors_of_servers_keep_their_words(body: bytes, message: str) -> None:
    assert answer_error(400, body).message == message


def test_an_unknown_certificate_has_a_remedy_of_its_own() -> None:
    unknown = unreachable(OSError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), "https://h")
    assert unknown.remedy.endswith("SSL_CERT_FILE") and unknown.value == "https://h"
    absent = unreachable(TimeoutError(), "http://h")
    assert absent.message == "no server answers: TimeoutError" and "jackfield serve" in absent.remedy


def test_a_missing_key_has_a_remedy() -> None:
    error = answer_error(401, b"{}", "2.5")
    assert (error.remedy, error.retry_after) == ("give the server's key by --api-key or JACKFIELD_API_KEY", 2.5)
    assert [seconds(text) for text in (None, "3", "-1", "Tue, 01 Jan")] == [None, 3.0, 0.0, None]


def test_events() -> None:
    event = decode('{"id": "x", "choices": [{"index": 0, "delta": {"content": "a"}}], "usage": null}')
    assert event.choices[0].new_text() == "a" and event.choices[0].has_output()
    thought = decode('{"choices": [{"delta": {"reasoning_content": "hm"}}]}').choices[0]
    assert (thought.new_text(), thought.has_output()) == ("", True)
    assert not decode('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}').choices[0].has_output()
    with pytest.raises(AnswerError, match="overloaded"):
        decode('{"error": {"message": "overloaded"}}')
    with pytest.raises(BrokenAnswerError, match="no event"):
        decode("{")


@given(st.lists(st.text(st.characters(exclude_characters="\r\n")), max_size=5), st.data())
def test_events_survive_any_cut(texts: list[str], data: st.DataObject) -> None:
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    stream = "".join(f": note{end}event: e{end}data: {json.dumps(text)}{end}{end}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    lines, found = EventLines(), []
    for begin, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += list(lines.feed(stream[begin:stop]))
    assert [json.loads(data) for data in found] == texts


def test_data_of_several_lines_is_joined() -> None:
    assert list(EventLines().feed(b"data: a\ndata: b\n\ndata: c\n")) == [b"a\nb"]
