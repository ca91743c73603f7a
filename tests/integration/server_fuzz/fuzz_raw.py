"""Requests as bytes on a socket: what well-behaved clients cannot send."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 30.0


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Line:
    """One kept-alive connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._http = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self, path: str, body: bytes, **headers: str) -> Answer:
        """Send a body as it is; ``content_type`` and the like become headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", path, body, {"content-type": "application/json", **named})

    def ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        self._http.request(method, path, body, headers)
        response = self._http.getresponse()
        data = response.read()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, data)


def connect(url: str) -> socket.socket:
    """Return a connection to a server."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 80), PATIENCE)


def until_closed(sock: socket.socket) -> bytes:
    """Return all that comes before the other side closes the connection."""
    pieces = []
    while piece := _receive(sock):
        pieces.append(piece)
    return b"".join(pieces)


def statuses(data: bytes) -> list[int]:
    """Return the status codes of the answers in a connection's bytes."""
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except ConnectionResetError:
        return b""
