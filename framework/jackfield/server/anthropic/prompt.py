"""From a request of the Messages API to the conversation that the chat template writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jackfield.errors import RequestError
from jackfield.server.anthropic.blocks import system_text, turns
from jackfield.server.anthropic.types import CountRequest, MessagesRequest
from jackfield.server.chat import Conversation, chat_ids, reads
from jackfield.server.extra import Refused, fields_renamed, refuse_keys, template_of
from jackfield.server.state import ServerState

Body = MessagesRequest | CountRequest

_TOOL: Refused = {
    "strict": ("calls are not held to a schema yet", (False,)),
    "defer_loading": ("tools are not searched here", (False,)),
    "input_examples": ("chat templates take no examples of calls", ([],)),
    "allowed_callers": ("tools are not called by code here", (["direct"],)),
}
_CHOICE: Refused = {"disable_parallel_tool_use": ("calls of tools cannot be limited yet", (False,))}
_OUTPUT: Refused = {"format": ("structured output is not available yet", ())}
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn thinking on and off."""


async def prompt_ids(state: ServerState, body: Body) -> list[int]:
    """Return the prompt of a request.

    Raises:
        RequestError: it holds what the model or its template does not take.
    """
    made = conversation(body, template_of(state))
    # Messages that were converted have other places than those of the request.
    with fields_renamed(messages="messages", continue_final_message="messages"):
        return await chat_ids(state, made)


def conversation(body: Body, template: str) -> Conversation:
    """Return the conversation of a request.

    Args:
        template: text of the chat template.

    Raises:
        RequestError: as :func:`prompt_ids`.
    """
    messages = turns(body.messages, template)
    if body.system:
        messages.insert(0, {"role": "system", "content": system_text(body.system)})
    continued = messages[-1]["role"] == "assistant"
    if continued and "tool_calls" in messages[-1]:
        raise RequestError(
            "a last message of the assistant is continued, and one that calls tools cannot be",
            field=f"messages.{len(body.messages) - 1}",
            remedy="send the results of the tools",
        )
    variables = {**_thinking(body, template), **_effort(body, template), **(body.chat_template_kwargs or {})}
    return Conversation(
        messages=messages,
        tools=_tools(body),
        variables=variables,
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )


def _tools(body: Body) -> list[dict[str, Any]] | None:
    tools = [_tool(tool, f"tools.{place}") for place, tool in enumerate(body.tools or ())]
    choice = body.tool_choice or {}
    kind = choice.get("type", "auto")
    refuse_keys(choice, _CHOICE, "tool_choice.")
    if kind not in ("auto", "none"):
        raise RequestError(
            "calls of tools cannot be forced yet: answers are text, and no parser reads calls out of them",
            field="tool_choice",
            value=kind,
            remedy="use 'auto' or 'none'",
        )
    return tools if tools and kind == "auto" else None


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise RequestError(
            f"tools of type '{tool['type']}' are not run here",
            field=f"{place}.type",
            value=tool["type"],
            remedy="define the tool with an input_schema, and run it yourself",
        )
    schema = tool.get("input_schema")
    if not isinstance(tool.get("name"), str) or not isinstance(schema, dict):
        remedy = "send {'name': ..., 'description': ..., 'input_schema': {...}}"
        raise RequestError("a tool has a name and an input_schema", field=place, remedy=remedy)
    refuse_keys(tool, _TOOL, f"{place}.")
    about = {"description": tool["description"]} if tool.get("description") is not None else {}
    return {"type": "function", "function": {"name": tool["name"], **about, "parameters": schema}}


def _thinking(body: Body, template: str) -> dict[str, Any]:
    asked = body.thinking
    if asked is None:
        return {}
    kind = asked.get("type")
    switch = next((name for name in _SWITCHES if _is_variable(template, name)), None)
    if kind == "disabled":
        return {switch: False} if switch else {}
    if kind not in ("enabled", "adaptive"):
        raise _no_thinking("type", kind, "thinking is 'disabled', 'enabled' or 'adaptive'", "use one of them")
    if switch is None:
        raise RequestError(
            "the model's chat template does not let it think", field="thinking", value=kind, remedy="leave it out"
        )
    _check_thinking(asked, getattr(body, "max_tokens", 0))
    return {switch: True}


def _check_thinking(asked: Mapping[str, Any], max_tokens: int) -> None:
    budget, display = asked.get("budget_tokens"), asked.get("display")
    if budget is not None and not (isinstance(budget, int) and budget >= max_tokens):
        text = "a budget for thinking below max_tokens cannot be kept"
        raise _no_thinking("budget_tokens", budget, text, "use {'type': 'adaptive'}")
    if display == "omitted":
        raise _no_thinking("display", display, "thoughts are a part of the text, and cannot be left out", "leave it")


def _no_thinking(name: str, value: Any, message: str, remedy: str) -> RequestError:
    return RequestError(message, field=f"thinking.{name}", value=value, remedy=remedy)


def _is_variable(template: str, name: str) -> bool:
    """Return whether the code of a template, and not only its text, has a name."""
    return re.search(rf"\{{[%{{](?:(?![%}}]\}}).)*\b{name}\b", template, re.DOTALL) is not None


def _effort(body: Body, template: str) -> dict[str, Any]:
    config = body.output_config or {}
    refuse_keys(config, _OUTPUT, "output_config.")
    effort = config.get("effort")
    if effort is None or (effort == "high" and not reads(template, "reasoning_effort")):
        return {}  # "high" is what the API does when nothing is said
    if not reads(template, "reasoning_effort"):
        raise RequestError(
            "the model's chat template does not read an effort",
            field="output_config.effort",
            value=effort,
            remedy="leave it out",
        )
    return {"reasoning_effort": effort}
