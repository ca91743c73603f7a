"""EventLog: collects what happens to the prefixes of a cache, until somebody takes it."""

from __future__ import annotations

from jackfield.interfaces import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent


class EventLog:
    """Events in the order in which they happened. Removals of one group that follow each other are one event."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def stored(self, event: BlocksStored) -> None:
        """Note blocks that became findable."""
        self._events.append(event)

    def removed(self, group: int, block_hash: bytes) -> None:
        """Note a prefix that was forgotten."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and last.group == group:
            last.hashes.append(block_hash)
        else:
            self._events.append(BlocksRemoved(group, [block_hash]))

    def cleared(self) -> None:
        """Note that all prefixes were forgotten."""
        self._events.append(CacheCleared())

    def take(self) -> list[CacheEvent]:
        """Return all events since the last call."""
        events, self._events = self._events, []
        return events
