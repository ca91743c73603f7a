"""Messages of content blocks become messages as chat templates know them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jackfield.errors import RequestError, did_you_mean
from jackfield.server.chat import reads

Made = dict[str, Any]

KNOWN = ("text", "tool_use", "tool_result", "thinking")
OTHER = ("image", "document", "search_result", "redacted_thinking", "server_tool_use", "container_upload")
ROLES = ("user", "assistant", "system")
_TAKEN = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use", "thinking"), "system": ("text",)}
_READ_AS = {"tool_use": "tool_calls", "tool_result": "tool_calls", "thinking": "reasoning_content"}
"""What a chat template must read so that a block is not lost."""


def system_text(system: str | list[dict[str, Any]]) -> str:
    """Return a system prompt as one text.

    Raises:
        RequestError: it holds what is not text.
    """
    return system if isinstance(system, str) else "\n".join(_texts(system, "system"))


def turns(messages: Sequence[Mapping[str, Any]], template: str) -> list[Made]:
    """Return messages for a chat template: a tool's result is a message of its own, and messages of one role that
    follow each other are one.

    Raises:
        RequestError: a message is malformed, or holds what the template or the model does not take.
    """
    made: list[Made] = []
    for place, message in enumerate(messages):
        for one in _turn(message, f"messages.{place}", template):
            _append(made, one)
    return made


def _append(made: list[Made], one: Made) -> None:
    last = made[-1] if made else None
    if last is None or last["role"] != one["role"] or one["role"] == "tool":
        made.append(one)
        return
    last["content"] = "\n".join(text for text in (last["content"], one["content"]) if text)
    for name in ("tool_calls", "reasoning_content"):
        if name in one:
            last[name] = last[name] + one[name] if name in last else one[name]


def _turn(message: Mapping[str, Any], place: str, template: str) -> list[Made]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RequestError(
            f"a message has one of the roles {', '.join(ROLES)}", field=f"{place}.role", value=role, remedy="set it"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [_block(one, role, f"{place}.content.{n}", template) for n, one in enumerate(_list(content, place))]
    if role == "assistant":
        return [_assistant(blocks, place)]
    return _user(role, blocks, place, reads(template, "is_error"))


def _list(content: Any, place: str) -> list[Any]:
    if not isinstance(content, list):
        remedy = "send a text, or a list of blocks such as {'type': 'text', 'text': ...}"
        raise RequestError("the content of a message is a text or a list of blocks", field=place, remedy=remedy)
    return content


def _block(block: Any, role: str, place: str, template: str) -> Mapping[str, Any]:
    """Return a block that the role, the model and the template take."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or kind not in KNOWN:
        raise _unknown(kind, place)
    if kind not in _TAKEN[role]:
        raise RequestError(f"a message of the {role} has no blocks of type '{kind}'", field=f"{place}.type", value=kind)
    read = _READ_AS.get(kind)
    if read is not None and not reads(template, read):
        raise RequestError(
            f"the model's chat template takes no blocks of type '{kind}': it does not read {read}",
            field=place,
            value=kind,
            remedy="leave it out, or ask a model that takes it",
        )
    return block


def _unknown(kind: Any, place: str) -> RequestError:
    if kind in OTHER:
        message, remedy = f"the model takes text only, and this block is of type '{kind}'", "leave it out"
        return RequestError(message, field=place, value=kind, remedy=f"{remedy}, or ask a model that takes it")
    hint = did_you_mean(kind, (*KNOWN, *OTHER)) if isinstance(kind, str) else ""
    remedy = hint or "send {'type': 'text', 'text': ...}"
    return RequestError("a content block needs a known type", field=f"{place}.type", value=kind, remedy=remedy)


def _assistant(blocks: Iterable[Mapping[str, Any]], place: str) -> Made:
    texts, thoughts, calls = list[str](), list[str](), list[Made]()
    for number, block in enumerate(blocks):
        where = f"{place}.content.{number}"
        if block["type"] == "tool_use":
            calls.append(_call(block, where))
        else:
            (texts if block["type"] == "text" else thoughts).append(_text(block, where))
    made: Made = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        made["tool_calls"] = calls
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    return made


def _user(role: str, blocks: Iterable[Mapping[str, Any]], place: str, marked: bool) -> list[Made]:
    made: list[Made] = []
    for number, block in enumerate(blocks):
        where = f"{place}.content.{number}"
        if block["type"] == "tool_result":
            made.append(_result(block, where, marked))
        else:
            _append(made, {"role": role, "content": _text(block, where)})
    return made or [{"role": role, "content": ""}]


def _call(block: Mapping[str, Any], place: str) -> Made:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise RequestError("a tool_use block has a name, and an object as its input", field=place, remedy="set both")
    return {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: Mapping[str, Any], place: str, marked: bool) -> Made:
    content, name = block.get("content", ""), block.get("tool_use_id")
    if not isinstance(name, str):
        raise RequestError("a tool_result block names its call", field=f"{place}.tool_use_id", value=name)
    text = content if isinstance(content, str) else "\n".join(_texts(_list(content, place), f"{place}.content"))
    made: Made = {"role": "tool", "tool_call_id": name, "content": text}
    if block.get("is_error"):
        # Few templates know errors of tools; the others show them as a part of the text.
        made |= {"is_error": True} if marked else {"content": f"Error: {text}"}
    return made


def _texts(blocks: Sequence[Any], place: str) -> list[str]:
    made = []
    for number, block in enumerate(blocks):
        where = f"{place}.{number}"
        if not isinstance(block, dict) or block.get("type") != "text":
            raise _unknown(block.get("type") if isinstance(block, dict) else None, where)
        made.append(_text(block, where))
    return made


def _text(block: Mapping[str, Any], place: str) -> str:
    name = str(block["type"])
    text = block.get(name)
    if not isinstance(text, str):
        raise RequestError(f"a block of type '{name}' holds a text", field=f"{place}.{name}", value=text)
    return text
