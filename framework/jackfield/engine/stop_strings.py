"""Finds stop strings in growing text, and holds back only what may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Watches one text.

    Args:
        stops: non-empty strings. keep: whether a stop string that was found stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool) -> None:
        self._stops = list(stops)
        self._keep = keep
        self._longest = max((len(s) for s in stops), default=0)
        self.text = ""
        self.safe = 0
        """Length of the text that can be given out: no stop string can begin before it."""

    def push(self, piece: str, *, armed: bool = True) -> str | None:
        """Add a piece; returns the stop string that ends the text (which is then cut), or None.

        Args:
            piece: new text. armed: False while ``min_tokens`` is not reached: stops in it do not count.
        """
        start = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        if not self._stops or not armed:
            self.safe = len(self.text)
            return None
        # What was given out already cannot be cut: begin behind it.
        hit = self._first_hit(max(start, self.safe))
        if hit is not None:
            place, stop = hit
            self.text = self.text[: place + len(stop) if self._keep else place]
            self.safe = len(self.text)
            return stop
        self.safe = len(self.text) - self._open_tail()
        return None

    def finish(self) -> None:
        """Say that no more text comes: all of it is safe."""
        self.safe = len(self.text)

    def _first_hit(self, start: int) -> tuple[int, str] | None:
        """Return the stop string that is complete first (ties: the one that begins first)."""
        found = [(place + len(s), place, s) for s in self._stops if (place := self.text.find(s, start)) >= 0]
        if not found:
            return None
        _, place, stop = min(found)
        return place, stop

    def _open_tail(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(s.startswith(tail) for s in self._stops):
                return size
        return 0
