"""What a request for a response must not ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from jackfield.errors import RequestError, did_you_mean
from jackfield.server.chat import reads
from jackfield.server.extra import Refused, refuse, refuse_keys
from jackfield.server.openai import params as build
from jackfield.server.responses.types import REFUSED, ResponsesRequest
from jackfield.server.state import ServerState

LOGPROBS = "message.output_text.logprobs"
INCLUDES = (
    LOGPROBS,
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    "reasoning.encrypted_content",
)
"""What can be included. All but the first are parts of items that no response here has."""

_GRAMMAR = "structured output is not available yet"
_TEXT: Refused = {"verbosity": ("verbosity is not available", ("medium",))}
_REASONING: Refused = {
    "summary": ("there are no summaries of thoughts", ()),
    "generate_summary": ("there are no summaries of thoughts", ()),
}
_TOOL: Refused = {"strict": ("calls are not held to a schema yet", (False,))}


GIVEN_BACK = ("input", "metadata", "tools", "prompt_cache_key", "safety_identifier", "user")
"""Fields that answers show as they came, and that nothing else looks into."""


def check(state: ServerState, body: ResponsesRequest) -> None:
    """Refuse what cannot be honoured.

    Raises:
        RequestError, ModelNotServedError: names the field.
    """
    state.check_model(body.model)
    refuse(body, REFUSED)
    for name in GIVEN_BACK:
        _check_writable(name, getattr(body, name))
    _check_include(state, body)
    _check_format(body.text or {})
    _check_stream(body)
    refuse_keys(body.reasoning or {}, _REASONING, "reasoning.")
    if body.background and body.store is False:
        raise RequestError(
            "a response in the background must be stored", field="background", value=True, remedy="set store to true"
        )


def template_tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    """Return functions as chat templates know them, or None when the model shall not hear of any.

    Raises:
        RequestError: a tool is no function, or its call would have to be forced.
    """
    tools = [_tool(tool, f"tools.{place}") for place, tool in enumerate(body.tools or ())]
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError(
            "calls of tools cannot be forced yet: answers are text, and no parser reads calls out of them",
            field="tool_choice",
            value=body.tool_choice,
            remedy="use 'auto' or 'none'",
        )
    return tools if tools and body.tool_choice != "none" else None


def template_variables(body: ResponsesRequest, template: str) -> dict[str, Any]:
    """Return variables of the chat template.

    Raises:
        RequestError: it does not read an effort.
    """
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not reads(template, "reasoning_effort"):
        raise RequestError(
            "the model's chat template does not read an effort",
            field="reasoning.effort",
            value=effort,
            remedy="leave it out",
        )
    own = {} if effort is None else {"reasoning_effort": effort}
    return {**own, **(body.chat_template_kwargs or {})}


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Return whether log probabilities are asked for."""
    return LOGPROBS in (body.include or ())


def _check_writable(field: str, value: Any) -> None:
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        text, remedy = "the text has half of a surrogate pair, which is no character", "send valid Unicode"
        raise RequestError(text, field=field, remedy=remedy) from None
    except RecursionError:
        raise RequestError("the value is nested too deeply", field=field, remedy="send a flatter one") from None


def _check_include(state: ServerState, body: ResponsesRequest) -> None:
    for place, name in enumerate(body.include or ()):
        if name not in INCLUDES:
            remedy = did_you_mean(name, INCLUDES) or f"known: {', '.join(INCLUDES)}"
            raise RequestError("there is nothing of this name", field=f"include.{place}", value=name, remedy=remedy)
    build.check_logprobs(state, "top_logprobs", body.top_logprobs)
    if body.top_logprobs and not wants_logprobs(body):
        raise RequestError(
            f"top_logprobs needs '{LOGPROBS}' in include",
            field="top_logprobs",
            value=body.top_logprobs,
            remedy="include it",
        )


def _check_format(text: Mapping[str, Any]) -> None:
    wanted = text.get("format")
    kind = wanted.get("type") if isinstance(wanted, dict) else "text" if wanted is None else None
    if kind in ("json_object", "json_schema", "grammar"):
        raise RequestError(_GRAMMAR, field="text.format", value=kind, remedy="use {'type': 'text'}")
    if kind != "text":
        raise RequestError("the type of text.format is 'text'", field="text.format", value=wanted, remedy="set it")
    refuse_keys(text, _TEXT, "text.")


def _check_stream(body: ResponsesRequest) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise RequestError("stream_options needs a stream", field="stream_options", remedy="set stream to true")
    refuse_keys(
        body.stream_options, {"include_obfuscation": ("events are not obfuscated", (False,))}, "stream_options."
    )


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:100]
        remedy = "define a function, and run it yourself"
        raise RequestError(f"tools of type '{kind}' are not run here", field=f"{place}.type", value=kind, remedy=remedy)
    if not isinstance(tool.get("name"), str):
        raise RequestError("a function has a name", field=f"{place}.name", value=tool.get("name"), remedy="set it")
    refuse_keys(tool, _TOOL, f"{place}.")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
