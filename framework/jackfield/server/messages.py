"""Messages of a conversation, as clients write them, made ready for a chat template of a text model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.errors import RequestError, did_you_mean

TEXT_PARTS: Mapping[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of content parts that are text, and the key that holds it."""
OTHER_PARTS = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "input_file")


def prepare_messages(messages: Sequence[Mapping[str, Any]], *, developer: bool) -> list[dict[str, Any]]:
    """Return messages whose content is one text: text parts are joined with line breaks, a missing content is empty.

    Args:
        messages: with ``role`` and what else the template reads. developer: whether the template knows that role; else
            it becomes ``system``.

    Raises:
        RequestError: a message is malformed, or holds what is not text; ``field`` is its place.
    """
    return [_message(message, f"messages.{place}", developer) for place, message in enumerate(messages)]


def _message(message: Mapping[str, Any], place: str, developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            "a message needs a role",
            field=f"{place}.role",
            value=role,
            remedy="system, developer, user, assistant or tool",
        )
    made = dict(message)
    made["role"] = "system" if role == "developer" and not developer else role
    made["content"] = _content(message, place)
    if message.get("tool_calls") is not None:
        made["tool_calls"] = _tool_calls(message["tool_calls"], f"{place}.tool_calls")
    return made


def _content(message: Mapping[str, Any], place: str) -> str:
    content, field = message.get("content"), f"{place}.content"
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":
        return ""
    if not isinstance(content, list):
        remedy = "send a text, or a list of parts such as {'type': 'text', 'text': ...}"
        raise RequestError("the content of a message is a text or a list of parts", field=field, remedy=remedy)
    return "\n".join([_part(part, f"{field}.{index}") for index, part in enumerate(content)])


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in OTHER_PARTS:
        raise RequestError(
            f"the model takes text only, and this content part is of type '{kind}'",
            field=place,
            value=kind,
            remedy="leave it out, or ask a model that takes it",
        )
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        hint = did_you_mean(kind, (*TEXT_PARTS, *OTHER_PARTS)) if isinstance(kind, str) else ""
        remedy = hint or "send {'type': 'text', 'text': ...}"
        raise RequestError("a content part needs a known type", field=f"{place}.type", value=kind, remedy=remedy)
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        field = f"{place}.{TEXT_PARTS[kind]}"
        raise RequestError("a text part holds a text", field=field, value=text, remedy="send a string")
    return text


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError("tool_calls is a list", field=place, value=calls, remedy="send a list of calls")
    return [_tool_call(call, f"{place}.{index}") for index, call in enumerate(calls)]


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        remedy = "send {'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
        raise RequestError("a tool call needs a function with a name", field=f"{place}.function", remedy=remedy)
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), place)}}


def _arguments(arguments: Any, place: str) -> Any:
    """Return arguments as an object: templates write them out as JSON, and a text would be quoted once more."""
    if arguments is None or arguments == "":
        return {}
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        field = f"{place}.function.arguments"
        remedy = "send the text of a JSON object"
        raise RequestError("the arguments of a tool call are no JSON object", field=field, remedy=remedy)
    return found
