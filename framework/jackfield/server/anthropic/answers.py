"""Answers of the Messages API: whole ones, and events of streams in the order that its clients expect."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from jackfield.engine.outputs import CompletionOutput, RequestOutput
from jackfield.server import errors, sse
from jackfield.server.generation import Generation, GenerationFailedError

PATH = "/v1/messages"


def new_id() -> str:
    """Return the id of a message."""
    return f"msg_{uuid.uuid4().hex}"


class MessageWriter:
    """Writes one message.

    Args:
        message_id: of the answer. model: name that the request used. max_tokens: that it asked for.
        stop_sequences: of the request.
    """

    def __init__(self, message_id: str, model: str, max_tokens: int, stop_sequences: list[str]) -> None:
        self._id, self._model, self._max_tokens, self._stops = message_id, model, max_tokens, stop_sequences
        self._tokens = 0

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """Return the whole answer."""
        completion = output.outputs[0]
        self._tokens = len(completion.token_ids)
        content = [{"type": "text", "text": completion.text}]
        return {**self._message(content), **self._end(completion), "usage": self._usage(output)}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yield server-sent events. An error becomes the last one."""
        begun = False
        try:
            async for _, output in generation.outputs():
                first = b"" if begun else self._begin(output)
                begun = True
                chunk = first + self._step(output)
                if chunk:
                    yield chunk
        except Exception as error:
            yield errors.shape_of(PATH).event(errors.fault_of(error))
        finally:
            generation.close()

    def _begin(self, output: RequestOutput) -> bytes:
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = {**self._message([]), **nothing, "usage": self._usage(output)}
        block = {"type": "text", "text": ""}
        return (
            _event("message_start", message=message)
            + _event("content_block_start", index=0, content_block=block)
            + _event("ping")
        )

    def _step(self, output: RequestOutput) -> bytes:
        completion, made = output.outputs[0], b""
        self._tokens += len(completion.token_ids)
        if completion.text:
            made = _event("content_block_delta", index=0, delta={"type": "text_delta", "text": completion.text})
        if output.finished:
            made += _event("content_block_stop", index=0)
            made += _event("message_delta", delta=self._end(completion), usage=self._usage(output))
            made += _event("message_stop")
        return made

    def _message(self, content: list[Any]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _end(self, completion: CompletionOutput) -> dict[str, Any]:
        return {"stop_reason": self._reason(completion), "stop_sequence": self._sequence(completion)}

    def _reason(self, completion: CompletionOutput) -> str:
        if completion.finish_reason == "abort":
            raise GenerationFailedError("the request was ended before its answer was complete")
        if completion.finish_reason == "length":
            return "max_tokens" if self._tokens >= self._max_tokens else "model_context_window_exceeded"
        return "end_turn" if self._sequence(completion) is None else "stop_sequence"

    def _sequence(self, completion: CompletionOutput) -> str | None:
        found = completion.stop_reason
        return found if isinstance(found, str) and found in self._stops else None

    def _usage(self, output: RequestOutput) -> dict[str, int]:
        # How much the cache had is known at the end; the sum of the input tokens is right at any time.
        return {
            "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
            "cache_read_input_tokens": output.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._tokens,
        }


def _event(kind: str, **data: Any) -> bytes:
    return sse.named_event(kind, {"type": kind, **data})
