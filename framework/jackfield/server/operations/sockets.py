"""The socket to listen on, bound before the model is loaded."""

from __future__ import annotations

import errno
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jackfield.config import ServerSection
from jackfield.errors import ConfigError

_WHY = {
    errno.EADDRINUSE: "something else listens there",
    errno.EACCES: "this user may not use it",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}


@contextmanager
def bound_socket(settings: ServerSection) -> Iterator[socket.socket]:
    """Give a socket that is bound to the server's address and does not listen yet; it is closed at the end, and the
    file of a Unix socket is removed.

    Raises:
        ConfigError: the address cannot be used.
    """
    if settings.uds is None:
        with _tcp(settings) as sock:
            yield sock
        return
    path = Path(settings.uds)
    with _unix(path) as sock:
        inode = path.stat().st_ino
        try:
            yield sock
        finally:
            # Another server may have taken the path over.
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()


def address_text(sock: socket.socket, settings: ServerSection) -> str:
    """Return the address of a bound socket for people: a URL, or ``unix:PATH``."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _tcp(settings: ServerSection) -> socket.socket:
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        message = f"the address to listen on is unknown: {getattr(error, 'strerror', None) or error}"
        remedy = "name an address of this machine, such as 127.0.0.1 or 0.0.0.0"
        raise ConfigError(message, field="server.host", value=settings.host, remedy=remedy) from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _tcp_error(error, settings) from None
    return sock


def _tcp_error(error: OSError, settings: ServerSection) -> ConfigError:
    why = _WHY.get(error.errno or 0, error.strerror or str(error))
    where = f"cannot listen on {settings.host}:{settings.port}: {why}"
    if error.errno == errno.EADDRNOTAVAIL:
        remedy = "name an address of this machine, such as 127.0.0.1 or 0.0.0.0"
        return ConfigError(where, field="server.host", value=settings.host, remedy=remedy)
    remedy = "choose another port, stop what uses it, or set 0 for a free one"
    return ConfigError(where, field="server.port", value=settings.port, remedy=remedy)


def _unix(path: Path) -> socket.socket:
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise _unix_error(path, error.strerror or str(error), "name a path in a folder that exists") from None
    return sock


def _clear(path: Path) -> None:
    """Remove the socket file that a server which died left behind."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise _unix_error(path, "a file that is no socket is there", "name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise _unix_error(path, error.strerror or str(error), "name another path") from None
    raise _unix_error(path, "something else listens there", "name another path, or stop what uses it")


def _unix_error(path: Path, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"cannot listen on the Unix socket: {why}", field="server.uds", value=str(path), remedy=remedy)
