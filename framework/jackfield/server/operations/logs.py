"""Log lines of the server: text or JSON, with request ids and without secrets."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any

from jackfield.config import EngineConfig
from jackfield.server.operations.calls import PROBES, Call, current_call

ROOTS = ("jackfield", "uvicorn")
"""Loggers whose records become lines."""
HIDDEN = "[secret]"
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, 0x85, 0x2028, 0x2029)}
_CLIENT_ERROR, _SERVER_ERROR = 400, 500

_access = logging.getLogger("jackfield.server.access")


class LineFormatter(logging.Formatter):
    """The base of both formats: takes the fields of a record, and hides secrets in every text.

    Args:
        secrets: texts that must not be shown.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        # A longer secret may hold a shorter one.
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return time, level, logger, message, request id, further fields and the exception of a record."""
        call = current_call.get()
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if call is not None:
            found["request_id"] = call.request_id
        found |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            found["exception"] = "".join(traceback.format_exception(record.exc_info[1]))
        return {name: self._hide(value) if isinstance(value, str) else value for name, value in found.items()}

    def _hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text


class JsonLines(LineFormatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return json.dumps(self.fields(record), default=str)


class TextLines(LineFormatter):
    """``TIME LEVEL LOGGER: MESSAGE name=value ...``; exceptions follow on lines of their own. Control characters of a
    message are escaped, so that nothing a client sends makes a line of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        found = self.fields(record)
        exception = found.pop("exception", "")
        time, level, name, message = (found.pop(key) for key in ("time", "level", "logger", "message"))
        rest = "".join(f" {key}={_word(value)}" for key, value in found.items())
        # Errors of this project have several lines, the later ones indented.
        lines = f"{message.replace(chr(10) + '  ', '; ')}{rest}".translate(_CONTROLS)
        text = f"{time} {level.upper()} {name}: {lines}"
        return f"{text}\n{exception.rstrip()}" if exception else text


def _word(value: object) -> str:
    text = str(value)
    return json.dumps(text) if any(letter in text for letter in ' ="') or not text else text


@contextmanager
def logging_to(stream: IO[str], config: EngineConfig, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Write the records of :data:`ROOTS` to ``stream`` while the context lasts, in the form of ``server.log_format``.
    The server's own records count from level info, unless ``log.level`` is set.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines(secrets) if config.server.log_format == "json" else TextLines(secrets))
    chosen = config.log.level.upper()
    levels = {"uvicorn": "WARNING", "jackfield": chosen}
    levels["jackfield.server"] = chosen if config.is_user_set("log.level") else "INFO"
    before = {name: _state(logging.getLogger(name)) for name in levels}
    for name, lowest in levels.items():
        logging.getLogger(name).setLevel(lowest)
    for name in ROOTS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        for name, (level, handlers, propagate) in before.items():
            logger = logging.getLogger(name)
            logger.setLevel(level)
            logger.handlers, logger.propagate = handlers, propagate


def _state(logger: logging.Logger) -> tuple[int, list[logging.Handler], bool]:
    return logger.level, logger.handlers, logger.propagate


def log_call(call: Call) -> None:
    """Log a call that is over: probes at level debug, server errors at warning, all others at info."""
    status = call.final_status
    level = logging.WARNING if status >= _SERVER_ERROR else logging.INFO
    if call.path in PROBES and status < _CLIENT_ERROR:
        level = logging.DEBUG
    if not _access.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "request_id": call.request_id,
        "route": call.route or "-",
        "status": status,
        "duration_ms": round(call.duration * 1000, 1),
        "client": call.client or "-",
    }
    if call.generations:
        fields |= {"prompt_tokens": call.prompt_tokens, "generation_tokens": call.generated}
    if call.left:
        fields["client_left"] = True
    _access.log(level, "%s %s", call.method, call.path, extra={"fields": fields})
