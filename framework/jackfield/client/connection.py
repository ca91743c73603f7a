"""A connection to a server: requests and streams, and errors in our own types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from jackfield.client.address import Address, parse_address
from jackfield.client.errors import BrokenAnswerError, answer_error, unreachable
from jackfield.client.events import DONE, Event, decode
from jackfield.client.wire import CONNECT_SECONDS, Wire
from jackfield.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import httpx2


def http_library() -> Any:
    """Return the HTTP client library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module("httpx2")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "talking to a server needs the package 'httpx2', which is not installed",
            field="--url",
            value=error.name,
            remedy="pip install 'jackfield[serve]'",
        ) from error


class Connection:
    """Talks to one server. A context manager.

    Args:
        url: ``http://HOST:PORT``, ``https://...`` or ``unix:PATH``. api_key: sent with each request, where given.
        timeout_s: longest time for one request, in seconds. app: an ASGI application to talk to, in this process,
            instead of a server.

    Raises:
        ConfigError: the URL is none, or the HTTP client library is not installed.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float | None = None, app: Any = None
    ) -> None:
        self._http = http_library()
        self.url = url
        self.timeout_s = timeout_s
        self._address = parse_address(url)
        self._headers = _headers(api_key)
        self._tls = self._http.create_ssl_context() if self._address.tls else None
        self._client = _client(self._http, self._address, self._headers, self._tls, app)

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def wire(self) -> Wire:
        """Return a client for timed streams of the same server."""
        return Wire(self._address, self._headers, self._tls)

    async def get(self, path: str) -> Any:
        """Return the JSON that a path holds.

        Raises:
            UnreachableError: nobody answers. AnswerError: the answer is an error. BrokenAnswerError: it is no JSON.
        """
        return _json(await self._send("GET", path, None))

    async def post(self, path: str, body: Any) -> Any:
        """Return the JSON that is answered to a JSON body. Raises as :meth:`get`."""
        return _json(await self._send("POST", path, msgspec.json.encode(body)))

    async def answer(self, path: str, body: Any) -> httpx2.Response:
        """Return the whole answer to a JSON body, whatever its status.

        Raises:
            UnreachableError: nobody answers. BrokenAnswerError: the connection broke, or the time is over.
        """
        return await self._send("POST", path, msgspec.json.encode(body))

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """Yield the events of a streamed answer. Close it to end the request early. Its time is the caller's to limit.

        Raises:
            UnreachableError: nobody answers. AnswerError: the answer, or an event in it, is an error.
            BrokenAnswerError: the connection broke, or the stream ended before its end mark.
        """
        data = msgspec.json.encode(body)
        with self._translated():
            async with self._client.stream("POST", path, content=data) as response:
                if response.status_code != 200:
                    raise answer_error(
                        response.status_code, await response.aread(), response.headers.get("retry-after")
                    )
                async for event in self._http.EventSource(response):
                    if event.data == DONE:
                        return
                    yield decode(event.data)
        raise BrokenAnswerError("the stream ended before its end mark")

    async def model(self, wanted: str | None) -> str:
        """Return ``wanted``, checked against the models of the server, or the server's first model.

        Raises:
            ConfigError: the server does not have it, or has none. Others as :meth:`get`.
        """
        answer = await self.get("/v1/models")
        cards = answer.get("data") if isinstance(answer, dict) else None
        names = [card["id"] for card in cards or () if isinstance(card, dict) and "id" in card]
        if wanted is None and names:
            return str(names[0])
        if wanted is None or wanted not in names:
            message = "the server has no model" if not names else "the server does not serve this model"
            known = f"it serves {', '.join(names)}" if names else "is this a server of OpenAI's API?"
            raise ConfigError(message, field="--model", value=wanted, remedy=did_you_mean(wanted or "", names) or known)
        return wanted

    async def _send(self, method: str, path: str, content: bytes | None) -> httpx2.Response:
        with self._translated():
            async with asyncio.timeout(self.timeout_s):
                response: httpx2.Response = await self._client.request(method, path, content=content)
                return response

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise errors of the library, and the end of the time, as our own."""
        http = self._http
        try:
            yield
        except (http.ConnectError, http.ConnectTimeout) as error:
            raise unreachable(error, self.url) from error
        except (http.TransportError, http.DecodingError, http.SSEError) as error:
            raise BrokenAnswerError(f"the connection broke: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise BrokenAnswerError(f"no whole answer within {self.timeout_s:g} s") from error


def _headers(api_key: str | None) -> dict[str, str]:
    key = {} if api_key is None else {"authorization": f"Bearer {_checked(api_key)}"}
    return {"content-type": "application/json", **key}


def _client(http: Any, address: Address, headers: dict[str, str], tls: Any, app: Any) -> httpx2.AsyncClient:
    limits = http.Limits(max_connections=None, max_keepalive_connections=None)
    transport = None
    if app is not None:
        transport = http.ASGITransport(app, raise_app_exceptions=False)
    elif address.socket is not None:
        transport = http.AsyncHTTPTransport(uds=address.socket, limits=limits)
    client: httpx2.AsyncClient = http.AsyncClient(
        base_url=address.base,
        headers=headers,
        limits=limits,
        timeout=http.Timeout(None, connect=CONNECT_SECONDS),
        transport=transport,
        verify=True if tls is None else tls,
        trust_env=not address.local,
    )
    return client


def _checked(api_key: str) -> str:
    """Return a key that fits into a header."""
    if api_key and api_key.isascii() and api_key.isprintable():
        return api_key
    raise ConfigError(
        "the API key must be printable ASCII characters", field="--api-key", value="...", remedy="give the server's key"
    )


def _json(response: httpx2.Response) -> Any:
    if response.status_code >= 400:
        raise answer_error(response.status_code, response.content, response.headers.get("retry-after"))
    try:
        return msgspec.json.decode(response.content)
    except msgspec.DecodeError as error:
        raise BrokenAnswerError(
            f"the answer is no JSON: {error}",
            field="--url",
            value=str(response.url),
            remedy="is this the server's URL?",
        ) from error
