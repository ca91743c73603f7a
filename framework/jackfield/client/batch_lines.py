"""Lines of batch files, in the layout of OpenAI's batch API."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

_FIELDS = ("custom_id", "method", "url", "body")
INVALID, FAILED = "invalid_line", "request_failed"
"""Codes of errors that are no answers of the server."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can be sent."""

    line: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be sent, and why. ``line`` counts from 1."""

    line: int
    reason: str


def read_lines(lines: Iterable[bytes]) -> Iterator[BatchRequest | BadLine]:
    """Yield what each line asks for. Empty lines do not count; an id that was used before makes a line bad."""
    used: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = _parse(number, line)
        if isinstance(entry, BatchRequest):
            first = used.setdefault(entry.custom_id, number)
            if first != number:
                entry = BadLine(number, f"custom_id '{entry.custom_id}' was used on line {first} already")
        yield entry


def answer_line(request: BatchRequest, status: int, request_id: str | None, body: Any) -> dict[str, Any]:
    """Return the output line of a request that was answered, whatever the status."""
    if request_id is None:
        request_id = str(body.get("id", "")) if isinstance(body, Mapping) else ""
    return _line(request.custom_id, {"status_code": status, "request_id": request_id, "body": body}, None)


def failure_line(request: BatchRequest, message: str) -> dict[str, Any]:
    """Return the output line of a request that got no answer."""
    return _line(request.custom_id, None, {"code": FAILED, "message": message, "line": request.line})


def bad_line(bad: BadLine) -> dict[str, Any]:
    """Return the output line of a line that could not be sent."""
    return _line(None, None, {"code": INVALID, "message": f"line {bad.line}: {bad.reason}", "line": bad.line})


def key_of(entry: Mapping[str, Any]) -> str | int | None:
    """Return what an output line is about: a custom_id, the number of a bad line, or None when it is no output line."""
    if not {"custom_id", "response", "error"} <= entry.keys():
        return None
    custom_id, error = entry["custom_id"], entry["error"]
    if isinstance(custom_id, str):
        return custom_id
    number = error.get("line") if isinstance(error, Mapping) else None
    return number if type(number) is int else None


def succeeded(entry: Mapping[str, Any]) -> bool:
    """Return whether an output line holds an answer that is no error."""
    response = entry["response"]
    return isinstance(response, Mapping) and response.get("status_code") == 200


def _line(custom_id: str | None, response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def _parse(number: int, line: bytes) -> BatchRequest | BadLine:
    try:
        entry = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BadLine(number, f"no JSON: {error}")
    if not isinstance(entry, dict):
        return BadLine(number, "no JSON object")
    faults = list(_faults(entry))
    if faults:
        return BadLine(number, "; ".join(faults))
    return BatchRequest(number, entry["custom_id"], entry["url"], entry["body"])


def _faults(entry: Mapping[str, Any]) -> Iterator[str]:
    missing = [name for name in _FIELDS if name not in entry]
    unknown = [name for name in entry if name not in _FIELDS]
    if missing:
        yield f"{', '.join(missing)} missing"
    if unknown:
        yield f"unknown: {', '.join(unknown)}"
    if not (isinstance(entry.get("custom_id", "-"), str) and entry.get("custom_id", "-")):
        yield "custom_id is no text"
    if entry.get("method", "POST") != "POST":
        yield "method must be POST"
    if not str(entry.get("url", "/")).startswith("/"):
        yield "url must be a path, such as /v1/chat/completions"
    body = entry.get("body", {})
    if not isinstance(body, dict):
        yield "body is no JSON object"
    elif body.get("stream"):
        yield "body.stream cannot be true in a batch"
