"""What can go wrong between a client and a server."""

from __future__ import annotations

from typing import Any

import msgspec

from jackfield.errors import ConfigError, JackfieldError

_LONGEST = 500


class UnreachableError(ConfigError):
    """Nothing answers at the address of the server."""


class BrokenAnswerError(JackfieldError):
    """The connection broke, or what came is no answer."""


class AnswerError(JackfieldError):
    """The server answered with an error.

    Args:
        message: the server's own words. status: of HTTP; 200 for an error in mid-stream. retry_after: seconds, where
            the server named them.
    """

    def __init__(self, message: str, status: int, *, retry_after: float | None = None) -> None:
        remedies = {401: "give the server's key by --api-key or JACKFIELD_API_KEY"}
        super().__init__(message, remedy=remedies.get(status, ""))
        self.status = status
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.message, self.status, self.retry_after)


def _rebuild(message: str, status: int, retry_after: float | None) -> AnswerError:
    return AnswerError(message, status, retry_after=retry_after)


def unreachable(error: Exception, url: str) -> UnreachableError:
    """Return the error of a connection that could not be opened."""
    text = str(error) or type(error).__name__
    remedy = "start one with `jackfield serve MODEL`, or give the address of one that runs"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        remedy = "name the file of the certificate, or of who signed it, in the variable SSL_CERT_FILE"
    return UnreachableError(f"no server answers: {text}", field="--url", value=url, remedy=remedy)


def answer_error(status: int, body: bytes, retry_after: str | None = None) -> AnswerError:
    """Return the error of an answer, in the server's own words where it has some."""
    return AnswerError(f"HTTP {status}: {_words(body)}", status, retry_after=seconds(retry_after))


def error_text(error: Any) -> str:
    """Return the message of an ``error`` object of OpenAI's API, or the object as text."""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message if message else error)[:_LONGEST]


def seconds(text: str | None) -> float | None:
    """Return a ``Retry-After`` in seconds; its other form, a date, counts as not given."""
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None


def _words(body: bytes) -> str:
    try:
        data = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:_LONGEST].decode(errors="replace").strip() or "no text"
    if isinstance(data, dict):
        data = next((data[name] for name in ("error", "detail", "message") if data.get(name)), data)
    return error_text(data)
