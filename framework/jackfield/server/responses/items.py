"""Items of a conversation: made whole for the store, and turned into messages for the chat template."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.errors import RequestError, did_you_mean
from jackfield.server.chat import reads
from jackfield.server.extra import moved
from jackfield.server.messages import prepare_messages

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
KNOWN = ("message", "function_call", "function_call_output")
OTHER = ("reasoning", "item_reference", "file_search_call", "web_search_call", "computer_call", "custom_tool_call")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


def input_items(given: str | Sequence[Mapping[str, Any]]) -> list[Item]:
    """Return the input of a request as whole items, each with an id.

    Raises:
        RequestError: an item is malformed or of an unknown type; ``field`` is its place.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"input.{place}") for place, item in enumerate(given)]


def messages_of(items: Sequence[Item], template: str) -> list[dict[str, Any]]:
    """Return items as messages for a chat template.

    Raises:
        RequestError: the template takes no calls of functions.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        if item["type"] != "message" and not reads(template, "tool_calls"):
            raise RequestError(
                f"the model's chat template takes no items of type '{item['type']}': it does not read tool_calls",
                field="input",
                value=item["type"],
                remedy="leave them out, or ask a model that takes them",
            )
        match item["type"]:
            case "message":
                messages.append({"role": item["role"], "content": _text(item["content"], item["role"], "input")})
            case "function_call":
                _add_call(messages, item)
            case _:
                text = _text(item["output"], "tool", "input")
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    return messages


def new_id(kind: str) -> str:
    """Return the id of an item of a type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def _item(item: Mapping[str, Any], place: str) -> Item:
    kind = item.get("type", "message")
    if kind not in KNOWN:
        raise _unknown(kind, place)
    made = {"id": new_id(kind), "status": "completed", **{k: v for k, v in item.items() if v is not None}, "type": kind}
    if kind == "message":
        made |= _message(item, place)
    elif kind == "function_call":
        _check_texts(item, place, ("call_id", "name", "arguments"))
    else:
        _check_texts(item, place, ("call_id",))
        _text(item.get("output"), "tool", f"{place}.output")
    if not isinstance(made["id"], str):
        raise RequestError("the id of an item is a text", field=f"{place}.id", value=made["id"])
    return made


def _message(item: Mapping[str, Any], place: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise RequestError(
            f"a message has one of the roles {', '.join(ROLES)}", field=f"{place}.role", value=role, remedy="set it"
        )
    _text(content, role, f"{place}.content")
    if isinstance(content, str):
        whole = {"type": "output_text", "text": content, "annotations": []}
        content = [whole if role == "assistant" else {"type": "input_text", "text": content}]
    return {"role": role, "content": content}


def _text(content: Any, role: str, place: str) -> str:
    try:
        [made] = prepare_messages([{"role": role, "content": content}], developer=True)
    except RequestError as error:
        raise moved(error, "messages.0.content", place) from error
    text: str = made["content"]
    return text


def _check_texts(item: Mapping[str, Any], place: str, names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            kind = item["type"]
            raise RequestError(f"a {kind} has a text {name}", field=f"{place}.{name}", value=item.get(name))


def _unknown(kind: Any, place: str) -> RequestError:
    if kind in OTHER:
        message = f"items of type '{kind}' are not available"
        return RequestError(message, field=place, value=kind, remedy="leave it out")
    hint = did_you_mean(kind, (*KNOWN, *OTHER)) if isinstance(kind, str) else ""
    remedy = hint or f"known types: {', '.join(KNOWN)}"
    return RequestError("an item needs a known type", field=f"{place}.type", value=kind, remedy=remedy)


def _add_call(messages: list[dict[str, Any]], item: Item) -> None:
    """Put a call into the assistant's message before it, or into one of its own."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item["name"], "arguments": item["arguments"]}
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": item["call_id"], "type": "function", "function": function})
