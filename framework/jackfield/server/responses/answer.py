"""The answer of a response as it grows: its text, log probabilities, usage and status."""

from __future__ import annotations

import time
import uuid
from typing import Any

from jackfield.engine.outputs import CompletionOutput, RequestOutput
from jackfield.protocol import SamplingParams
from jackfield.server import errors
from jackfield.server.generation import GenerationFailedError, Usage
from jackfield.server.openai import logprobs as lp
from jackfield.server.responses.checks import wants_logprobs
from jackfield.server.responses.items import Item, new_id
from jackfield.server.responses.types import ResponsesRequest
from jackfield.server.state import ServerState


class Answer:
    """The answer of one response.

    Args:
        state: of the server. body: the request. params: as sampled. stored: whether the response is kept.
    """

    def __init__(self, state: ServerState, body: ResponsesRequest, params: SamplingParams, *, stored: bool) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.item_id = new_id("message")
        self.logprobs: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self.status = "queued" if body.background else "in_progress"
        self._body, self._params = body, params
        self._writer = lp.TokenWriter(state.engine.tokenizer, as_ids=False, skip_special=params.skip_special_tokens)
        self._usage: Usage | None = None
        self._error: dict[str, Any] | None = None
        self._created = int(time.time())
        self._completed: int | None = None
        self._settings = _settings(state, body, params, stored=stored)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def over(self) -> bool:
        """Whether nothing comes any more."""
        return self.status not in ("queued", "in_progress")

    def take(self, output: RequestOutput) -> tuple[str, list[dict[str, Any]]]:
        """Add what an output holds, and return its text and log probabilities.

        Raises:
            GenerationFailedError: the engine ended the request.
        """
        completion = output.outputs[0]
        if completion.finish_reason == "abort":
            raise GenerationFailedError("the request was ended before its answer was complete")
        entries = self._entries(completion)
        self.status = "in_progress"
        self._texts.append(completion.text)
        self.logprobs += entries
        usage = self._usage = self._usage or Usage()
        usage.prompt, usage.cached = len(output.prompt_token_ids), output.num_cached_tokens
        usage.completion += len(completion.token_ids)
        if output.finished:
            self.status = "incomplete" if completion.finish_reason == "length" else "completed"
            self._completed = int(time.time()) if self.status == "completed" else None
        return completion.text, entries

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        fault = errors.fault_of(error)
        code = "invalid_prompt" if fault.status < 500 else "server_error"
        self.status, self._error = "failed", {"code": code, "message": fault.message}

    def cancel(self) -> None:
        """End before the end."""
        self.status = "cancelled"

    def part(self) -> dict[str, Any]:
        """Return the text as a part of the message."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self) -> Item:
        """Return the message of the assistant."""
        status = self.status if self.status in ("in_progress", "completed") else "incomplete"
        return {**self.head(), "status": status, "content": [self.part()]}

    def head(self) -> Item:
        """Return the message before it has any text."""
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}

    def response(self) -> dict[str, Any]:
        """Return the response as it stands; its output is there once it is over."""
        cut = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed,
            "status": self.status,
            "error": self._error,
            "incomplete_details": cut,
            "output": [self.item()] if self.over and self._usage is not None else [],
            "usage": _usage(self._usage) if self.over and self._usage is not None else None,
            **self._settings,
        }

    def _entries(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        if not wants_logprobs(self._body):
            return []
        ids, entries = lp.visible(completion, self._params, all_tokens=False)
        made = lp.chat_logprobs(self._writer, ids, entries, self._body.top_logprobs or 0)["content"]
        # Clients of this API know no tokens without bytes.
        for one in (other for entry in made for other in (entry, *entry["top_logprobs"])):
            one["bytes"] = one["bytes"] or []
        found: list[dict[str, Any]] = made
        return found


def _settings(state: ServerState, body: ResponsesRequest, params: SamplingParams, *, stored: bool) -> dict[str, Any]:
    """Return what a response gives back of its request."""
    reasoning = body.reasoning or {}
    return {
        "model": state.check_model(body.model),
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": True if body.parallel_tool_calls is None else body.parallel_tool_calls,
        "background": bool(body.background),
        "store": stored,
        "metadata": body.metadata or {},
        "service_tier": "default",
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "user": body.user,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }
