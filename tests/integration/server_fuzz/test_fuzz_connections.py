"""Bytes that no client library sends: each connection gets what it deserves, and the server goes on."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import pytest
from fuzz_cases import ROUTES, Route
from fuzz_pair import TIMEOUT_S, Pair
from fuzz_raw import Answer, Line, connect, statuses, until_closed

PATHS = [route.path for route in ROUTES]
TEXT = ROUTES[1]
GOOD = json.dumps(TEXT.body).encode()


def url(pair: Pair, route: Route) -> str:
    return (pair.embedder if route.pools else pair.writer).url


def message(route: Route, answer: Answer) -> str:
    """Return the message of an error in the shape of its route."""
    body: Any = answer.json()
    if route.anthropic:
        assert body["type"] == "error" and answer.headers["request-id"] == body["request_id"]
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    found: str = body["error"]["message"]
    return found


def head(path: str, *lines: str, version: str = "1.1") -> bytes:
    """Return the head of a request."""
    return "\r\n".join([f"POST {path} HTTP/{version}", "host: x", *lines, "", ""]).encode()


def full(path: str, body: bytes, *lines: str, version: str = "1.1") -> bytes:
    """Return a whole request."""
    about = ("content-type: application/json", f"content-length: {len(body)}")
    return head(path, *about, *lines, version=version) + body


@pytest.mark.parametrize("route", ROUTES, ids=PATHS)
def test_bodies_that_are_no_json(pair: Pair, route: Route) -> None:
    bodies = {
        b"": "the request has no body; send a JSON object",
        b"\xff\xfe\x00": "the body is no JSON: it is not encoded in UTF-8",
        b"{": "the body is no JSON: Expecting property name enclosed in double quotes at character 1",
        b"\x00" * 100: "the body is no JSON: Expecting value at character 0",
        b'{"a": 1} {"b": 2}': "the body is no JSON: Extra data at character 9",
        b'{"a": 1' + b"0" * 5000 + b"}": "the body is no JSON that can be read: a number has too many digits",
    }
    with Line(url(pair, route)) as line:
        for body, expected in bodies.items():
            answer = line.post(route.path, body)
            assert (answer.status, message(route, answer)) == (400, expected), body
        for body in (b"[]", b"null", b'"text"', b"5", b"true"):
            assert line.post(route.path, body).status == 400, body


@pytest.mark.parametrize("route", ROUTES, ids=PATHS)
def test_compressed_bodies_are_refused(pair: Pair, route: Route) -> None:
    bomb = gzip.compress(b"[" * 50_000_000, 9)
    with Line(url(pair, route)) as line:
        for coding in ("gzip", "deflate", "br", "gzip, gzip", "x"):
            answer = line.post(route.path, bomb, content_encoding=coding)
            assert answer.status == 415, (coding, answer.body)
            assert message(route, answer) == "request bodies are taken as they are, without a content-encoding"
    with Line(url(pair, route)) as line:
        assert line.post(route.path, json.dumps(route.body).encode(), content_encoding="identity").status != 415


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "\xff/\xff"]
)
@pytest.mark.parametrize("route", ROUTES, ids=PATHS)
def test_other_content_types_are_refused(pair: Pair, route: Route, kind: str) -> None:
    with Line(url(pair, route)) as line:
        answer = line.post(route.path, json.dumps(route.body).encode(), content_type=kind)
    assert answer.status == 400 and message(route, answer), answer.body


@pytest.mark.parametrize("route", ROUTES, ids=PATHS)
def test_too_many_headers_are_refused(pair: Pair, route: Route) -> None:
    body = json.dumps(route.body).encode()
    with Line(url(pair, route)) as line:
        many = line.post(route.path, body, **{f"x_{number}": "1" for number in range(1000)})
        assert many.status == 431 and "headers are too many; the limit is 100" in message(route, many)
    with Line(url(pair, route)) as line:
        large = line.post(route.path, body, x="a" * 70_000)
        assert large.status == 431 and "bytes of headers are too many" in message(route, large)


def test_a_head_that_never_ends_is_cut_off(pair: Pair) -> None:
    with connect(pair.writer.url) as sock:
        try:
            for number in range(10_000):
                sock.sendall(f"POST /v1/completions HTTP/1.1\r\nx-{number}: ".encode() + b"a" * 1000 + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):
            return
        assert statuses(until_closed(sock)) == [400]


def test_bodies_that_never_come_time_out(pair: Pair) -> None:
    chunked = head(TEXT.path, "content-type: application/json", "transfer-encoding: chunked")
    announced = head(TEXT.path, "content-type: application/json", "content-length: 100")
    begun = time.monotonic()
    socks = [connect(pair.writer.url) for _ in range(40)]
    for place, sock in enumerate(socks):
        sock.sendall((chunked + b"1\r\n{\r\n") if place % 2 else announced + b"{")
    for _ in range(3):
        time.sleep(0.3)
        for sock in socks[1::2]:
            sock.sendall(b"1\r\n \r\n")
    answers = [until_closed(sock) for sock in socks]
    for sock, answer in zip(socks, answers, strict=True):
        assert statuses(answer) == [408] and b'"code":"request_timeout"' in answer
        sock.close()
    assert TIMEOUT_S - 0.5 < time.monotonic() - begun < 5 * TIMEOUT_S


def test_bodies_without_an_end_are_cut_off_at_the_limit(pair: Pair) -> None:
    with connect(pair.writer.url) as sock:
        sock.sendall(head(TEXT.path, "content-type: application/json", "transfer-encoding: chunked"))
        piece = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        try:
            for _ in range(40):
                sock.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            return
        assert statuses(until_closed(sock)) == [413]


@pytest.mark.parametrize("length", ["-1", "1e3", "99999999999999999999", "5, 5", "０"])
def test_lengths_that_are_none(pair: Pair, length: str) -> None:
    with connect(pair.writer.url) as sock:
        sock.sendall(head(TEXT.path, f"content-length: {length}") + b"{")
        sock.settimeout(20)
        assert statuses(until_closed(sock))[0] in (400, 408, 413)


def test_old_and_pipelined_requests(pair: Pair) -> None:
    with connect(pair.writer.url) as sock:
        sock.sendall(full(TEXT.path, GOOD, version="1.0"))
        assert statuses(until_closed(sock)) == [200]
    with connect(pair.writer.url) as sock:
        bad = full(TEXT.path, b'{"prompt": 5}')
        sock.sendall(full(TEXT.path, GOOD) + bad + full(TEXT.path, GOOD) + full(TEXT.path, GOOD, "connection: close"))
        assert statuses(until_closed(sock)) == [200, 400, 200, 200]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 10 + b"\x00\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: \x00\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
        "POST /v1/ü HTTP/1.1\r\nhost: x\r\n\r\n".encode(),
    ],
)
def test_what_is_no_http(pair: Pair, data: bytes) -> None:
    with connect(pair.writer.url) as sock:
        sock.sendall(data)
        found = statuses(until_closed(sock))
    assert found and set(found) <= {400, 404}


@pytest.mark.parametrize(
    "path", ["/v1/completions/", "/v1//completions", "/%00", "/%ff", "/v1/completions?" + "a" * 8000]
)
def test_odd_paths(pair: Pair, path: str) -> None:
    with Line(pair.writer.url) as line:
        answer = line.post(path, GOOD)
    assert answer.status in (200, 307, 404)


def test_clients_that_leave_at_any_point(pair: Pair) -> None:
    whole = full(TEXT.path, json.dumps({"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}).encode())
    for end in range(0, len(whole) + 1, 7):
        with connect(pair.writer.url) as sock:
            sock.sendall(whole[:end])
    for wanted in (1, 20, 600, 3000):
        with connect(pair.writer.url) as sock:
            sock.sendall(whole)
            received = 0
            while received < wanted:
                received += len(sock.recv(wanted - received))
