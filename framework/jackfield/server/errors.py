"""From errors to HTTP answers. What an error looks like depends on the API, chosen by the path."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from jackfield.errors import EngineDeadError, JackfieldError, RequestError
from jackfield.server.operations.calls import current_call, route_path
from jackfield.server.state import ModelNotServedError

_logger = logging.getLogger("jackfield.server")
_LONGEST = 2000
"""Characters of a message; texts that clients sent may be much longer."""
_RETRY_AFTER_S = "1"
_NAMES = {"prompt_token_ids": "prompt"}
"""Fields of the engine that requests know under another name."""
_QUEUE_FULL, _ENGINE_DEAD = "queue_full", "engine_dead"
_CLIENT_GONE = 499


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as clients see it.

    Args:
        status: of HTTP. message: for people. type, code: for programs. param: the request's field at fault.
        headers: of the answer.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class ErrorShape(Protocol):
    """How one API writes errors."""

    def status(self, fault: Fault) -> int:
        """Return the HTTP status of an error."""

    def body(self, fault: Fault) -> dict[str, Any]:
        """Return the body of an error."""

    def event(self, fault: Fault) -> bytes:
        """Return the server-sent event of an error in mid-stream."""


class OpenAIShape:
    """``{"error": {message, type, param, code}}``."""

    def status(self, fault: Fault) -> int:
        """Return the HTTP status of an error."""
        return fault.status

    def body(self, fault: Fault) -> dict[str, Any]:
        """Return the body of an error."""
        return {
            "error": {"message": fault.message, "type": fault.type, "param": fault.param, "code": fault.code},
        }

    def event(self, fault: Fault) -> bytes:
        """Return a nameless event with the body of the error."""
        return b"data: " + msgspec.json.encode(self.body(fault)) + b"\n\n"


class AnthropicShape:
    """``{"type": "error", "error": {type, message}, request_id}``; the id is there where the request has one."""

    _TYPES = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }

    def status(self, fault: Fault) -> int:
        """Return the HTTP status of an error: this API has one of its own for a server that is full."""
        return 529 if fault.code == _QUEUE_FULL else fault.status

    def body(self, fault: Fault) -> dict[str, Any]:
        """Return the body of an error; the field at fault becomes a part of the message."""
        status, call = self.status(fault), current_call.get()
        kind = self._TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        if fault.code == _ENGINE_DEAD:
            kind = "api_error"
        named = fault.param and not fault.message.startswith(f"{fault.param}: ")
        message = f"{fault.param}: {fault.message}" if named else fault.message
        body = {"type": "error", "error": {"type": kind, "message": message}}
        return body if call is None else {**body, "request_id": call.request_id}

    def event(self, fault: Fault) -> bytes:
        """Return an event of the name ``error``."""
        return b"event: error\ndata: " + msgspec.json.encode(self.body(fault)) + b"\n\n"


SHAPES: tuple[tuple[str, ErrorShape], ...] = (("/v1/messages", AnthropicShape()), ("", OpenAIShape()))
"""Shapes by the beginning of the path; the first that fits holds."""


class ClientGoneError(Exception):
    """The client closed the connection before it was answered."""


class NotKeptError(HTTPException):
    """404: a field of a request names something that is not here.

    Args:
        detail: what is missing. param: the field.
    """

    def __init__(self, detail: str, param: str) -> None:
        super().__init__(404, detail)
        self.param = param


def shape_of(path: str) -> ErrorShape:
    """Return the shape of errors below a path."""
    return next(shape for prefix, shape in SHAPES if path.startswith(prefix))


def fault_of(error: BaseException) -> Fault:
    """Return what clients see of an error. Errors that nobody expected are logged and told without detail."""
    match error:
        case RequestValidationError():
            return _invalid(error.errors())
        case ModelNotServedError():
            return Fault(404, _text(error), "invalid_request_error", "model", "model_not_found")
        case RequestError() if error.field == "scheduler.max_waiting":
            headers = {"retry-after": _RETRY_AFTER_S}
            return Fault(503, _text(error), "service_unavailable", None, _QUEUE_FULL, headers)
        case RequestError():
            return Fault(400, _text(error), "invalid_request_error", _param(error.field), None)
        case EngineDeadError():
            return Fault(503, _text(error), "service_unavailable", None, _ENGINE_DEAD)
        case HTTPException() if isinstance(error.__cause__, ValueError | RecursionError):
            return Fault(400, _unreadable(error.__cause__), "invalid_request_error", None, "invalid_json")
        case HTTPException():
            return _of_http(error)
        case JackfieldError():
            _logger.error("a request failed: %s", error)
            return Fault(500, _text(error), "server_error", None, "internal_error")
    _logger.error("a request failed", exc_info=error)
    return Fault(500, "the server failed on this request; its log says why", "server_error", None, "internal_error")


def answer(fault: Fault, path: str) -> Response:
    """Return the HTTP answer of a fault on a path."""
    shape = shape_of(path)
    body = msgspec.json.encode(shape.body(fault))
    return Response(body, shape.status(fault), dict(fault.headers), media_type="application/json")


def install(app: FastAPI) -> None:
    """Let ``app`` answer all errors in the shape of the path."""
    for kind in (JackfieldError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(ClientGoneError, _gone)


async def _handle(request: Request, error: Exception) -> Response:
    return answer(fault_of(error), route_path(request.scope))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


def _text(error: JackfieldError) -> str:
    # Rules of sampling parameters are whole sentences, which their remedies only repeat.
    repeated = (error.field or "").startswith("sampling_params.")
    return _shorten(f"{error.message}; {error.remedy}" if error.remedy and not repeated else error.message)


def _shorten(text: str) -> str:
    # A text with half of a surrogate pair, which JSON can bring in, cannot be sent back as it is.
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return text.encode("utf-8", "backslashreplace").decode()


def _param(name: str | None) -> str | None:
    if name is None:
        return None
    name = name.removeprefix("sampling_params.")
    return _shorten(_NAMES.get(name, name))


def _invalid(problems: Sequence[Any]) -> Fault:
    if problems[0]["type"] == "json_invalid":
        return Fault(400, _sentence(problems[0]), "invalid_request_error", None, "invalid_json")
    lines = [(_place(problem["loc"]), _sentence(problem)) for problem in problems]
    text = "; ".join(f"{place}: {line}" if place else line for place, line in lines)
    return Fault(400, _shorten(text), "invalid_request_error", _shorten(lines[0][0]) or None)


def _place(loc: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in loc[1:])


def _sentence(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "json_invalid":
        return f"the body is no JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
    if problem["type"] == "missing" and len(problem["loc"]) == 1:
        return "the request has no body; send a JSON object"
    text = str(problem["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _unreadable(cause: BaseException) -> str:
    match cause:
        case RecursionError():
            return "the body is no JSON that can be read: lists or objects lie too deep in each other"
        case UnicodeDecodeError():
            return "the body is no JSON: it is not encoded in UTF-8"
    return "the body is no JSON that can be read: a number has too many digits"


def _of_http(error: HTTPException) -> Fault:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kind = kinds.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    param = error.param if isinstance(error, NotKeptError) else None
    return Fault(error.status_code, _shorten(str(error.detail)), kind, param, headers=error.headers or {})
