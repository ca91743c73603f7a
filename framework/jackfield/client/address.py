"""Addresses of servers as people write them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from jackfield.errors import ConfigError

_LOCAL = ("localhost", "127.0.0.1", "::1")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is.

    Args:
        base: beginning of all its URLs, without ``/v1``. host, port: to connect to. path: that all paths begin with.
        tls: whether connections are encrypted. socket: path of a Unix socket to connect to instead, or None.
    """

    base: str
    host: str
    port: int
    path: str = ""
    tls: bool = False
    socket: str | None = None

    @property
    def local(self) -> bool:
        """Whether the server is on this machine, so that no proxy stands between."""
        return self.socket is not None or self.host in _LOCAL

    @property
    def authority(self) -> str:
        """Host and port as in the header ``Host``."""
        return urlsplit(self.base).netloc


def parse_address(url: str) -> Address:
    """Return the address in ``http://HOST:PORT``, ``https://...`` or ``unix:PATH``; a ``/v1`` at the end is left out.

    Raises:
        ConfigError: the URL is none of these.
    """
    if url.startswith("unix:") and len(url) > len("unix:"):
        return Address("http://localhost", "localhost", 80, socket=url.removeprefix("unix:"))
    base = url.rstrip("/").removesuffix("/v1").rstrip("/")
    parts = _split(base)
    if parts is None:
        raise ConfigError(
            "this is no address of a server",
            field="--url",
            value=url,
            remedy="write http://HOST:PORT, https://HOST:PORT or unix:PATH",
        )
    port = parts.port or _PORTS[parts.scheme]
    return Address(base, str(parts.hostname), port, parts.path, tls=parts.scheme == "https")


def _split(url: str) -> SplitResult | None:
    """Return the parts of an HTTP URL with a host and without a user, a query or a fragment; None for others."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # checked when it is read
    except ValueError:
        return None
    plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    return parts if parts.scheme in _PORTS and parts.hostname and plain and url.isascii() else None
