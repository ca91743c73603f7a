"""API keys."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jackfield.config import ServerSection
from jackfield.errors import ConfigError
from jackfield.server.errors import Fault
from jackfield.server.operations.calls import PROBES, route_path
from jackfield.server.operations.faults import refuse

OPEN_PATHS = PROBES | {"/"}
"""Paths that need no key: probes, and the page for people, which asks for the key itself."""
_KEY = re.compile(r"[!-~]{1,4096}")
_FAULT = Fault(
    401,
    "a valid API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
    "authentication_error",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)


def read_keys(settings: ServerSection) -> tuple[str, ...]:
    """Return all keys: those of ``server.api_key`` and those of the lines of ``server.api_key_file``. In the file,
    empty lines and lines that begin with ``#`` do not count.

    Raises:
        ConfigError: the file cannot be read or has no key, or a key is not 1 to 4096 visible ASCII characters.
    """
    own = _check(settings.api_key, "server.api_key")
    return own if settings.api_key_file is None else (*own, *_from_file(settings.api_key_file))


def _from_file(path: str) -> tuple[str, ...]:
    field, remedy = "server.api_key_file", "name a text file with one key on each line"
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(
            f"the file of API keys cannot be read: {why}", field=field, value=path, remedy=remedy
        ) from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError("the file of API keys holds no key", field=field, value=path, remedy=remedy)
    return _check(keys, field)


def _check(keys: Iterable[str], field: str) -> tuple[str, ...]:
    found = tuple(keys)
    wrong = [str(place) for place, key in enumerate(found, 1) if not _KEY.fullmatch(key)]
    if wrong:
        # Keys are secrets, so the error names places.
        raise ConfigError(
            f"an API key is 1 to 4096 visible ASCII characters; this does not hold for number {', '.join(wrong)}",
            field=field,
            value="(not shown)",
            remedy="leave out spaces and other characters",
        )
    return found


class ApiKeys:
    """Lets requests pass that bring one of the keys, as ``Authorization: Bearer KEY`` or as ``x-api-key: KEY``.
    :data:`OPEN_PATHS` need none.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or route_path(scope) in OPEN_PATHS or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            await refuse(_FAULT, scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip()] if scheme.lower() == "bearer" else []
        given += headers.getlist("x-api-key")
        # Every key is compared, by digests of one length, so that the time tells nothing of any key.
        matches = [hmac.compare_digest(_digest(key), known) for key in given[:2] for known in self._digests]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
