"""Server-sent events out of bytes as they arrive."""

from __future__ import annotations

from collections.abc import Iterator


class EventLines:
    """Puts together the data of events. Lines end with LF or CRLF, and may be cut anywhere between pieces; names, ids
    and comments are left out.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of each event that ``piece`` completes. Read it to its end.

        >>> lines = EventLines()
        >>> [*lines.feed(b"data: a\\n"), *lines.feed(b"\\ndata:b\\r\\n\\r"), *lines.feed(b"\\ndata: c")]
        [b'a', b'b']
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = self._data, []
                yield b"\n".join(data)
