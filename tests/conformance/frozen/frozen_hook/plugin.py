"""Counts how requests end. A listener hears events and changes nothing of what the engine computes."""

import logging
from collections import Counter

from jackfield.interfaces import hookimpl

_logger = logging.getLogger("frozen_hook")


class FrozenHook:
    """Listens to requests that end, and tells the counts when the engine stops."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()

    @hookimpl
    def request_finished(self, request_id: str, finish_reason: str) -> None:
        self.ends[finish_reason] += 1

    @hookimpl
    def engine_stopping(self) -> None:
        _logger.info("requests ended: %s", dict(self.ends))
