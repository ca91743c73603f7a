"""Responses that are kept in memory, so that they can be asked for by their ids."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from fastapi import Request
from starlette.exceptions import HTTPException

from jackfield.config import ServerSection
from jackfield.errors import RequestError
from jackfield.server.responses.record import Record

MAX_RESPONSES = 10_000
"""Responses that are kept at most, however small they are."""


class ResponseStore:
    """Keeps the responses that were used last, within a number of bytes. Those that still run are always kept; when
    there is no room beside them, they keep the events only that somebody reads.

    Args:
        limit: in bytes, of what responses hold as JSON. absent: why there is no store; empty when there is one.
    """

    def __init__(self, limit: int, absent: str = "") -> None:
        self.absent = absent
        self._limit = limit
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def size(self) -> int:
        """Bytes of all responses together."""
        return self._size

    def check(self, field: str, value: object) -> None:
        """Refuse a field that needs a store where there is none.

        Raises:
            RequestError: there is none.
        """
        if self.absent:
            raise RequestError(self.absent, field=field, value=value, remedy=f"leave {field} out")

    def check_room(self) -> None:
        """Refuse a response in the background while those that run fill the store.

        Raises:
            RequestError: they do.
        """
        if self._is_full():
            raise RequestError(
                "too many responses are running",
                field="scheduler.max_waiting",
                value=len(self._records),
                remedy="try again later, or raise response_store_bytes",
            )

    def get(self, response_id: str) -> Record:
        """Return a response.

        Raises:
            HTTPException: 404: it is not, or no longer, kept.
        """
        if self.absent:
            raise HTTPException(404, f"{self.absent}, so there is no response '{response_id[:100]}'")
        if response_id not in self._records:
            raise HTTPException(404, f"there is no response '{response_id[:100]}' here, or it is no longer kept")
        self._records.move_to_end(response_id)
        return self._records[response_id]

    def add(self, record: Record) -> None:
        """Keep a response, and let go of older ones where room is needed."""
        self._records[record.answer.id] = record
        record.grown = partial(self._grown, record)
        self._grown(record, record.size)

    def remove(self, record: Record) -> None:
        """Let go of a response."""
        if self._records.pop(record.answer.id, None) is not None:
            record.grown = lambda size: None
            self._size -= record.size

    def _grown(self, record: Record, size: int) -> None:
        self._size += size
        if record.over and record.size > self._limit:
            self.remove(record)
            return
        while self._is_full():
            old = next((one for one in self._records.values() if one.over), None)
            if old is None:
                self._size -= record.forget_events()
                return
            self.remove(old)

    def _is_full(self) -> bool:
        return self._size > self._limit or len(self._records) > MAX_RESPONSES


def make_store(settings: ServerSection) -> ResponseStore:
    """Return the store of a server. There is none where a request may reach another process than the one before."""
    absent = ""
    if settings.response_store_bytes == 0:
        absent = "this server keeps no responses"
    elif settings.api_processes > 1:
        absent = f"this server keeps no responses: it has {settings.api_processes} API processes, which share none"
    return ResponseStore(settings.response_store_bytes, absent)


def store_of(request: Request) -> ResponseStore:
    """Return the store of the app that a request reached."""
    store: ResponseStore = request.app.state.responses
    return store
