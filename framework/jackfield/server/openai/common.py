"""What chat and text completions share: identity of an answer, streams, small checks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Response

from jackfield.engine.outputs import CompletionOutput, RequestOutput
from jackfield.server import errors, sse
from jackfield.server.generation import Generation, Usage
from jackfield.server.openai.types import SamplingFields


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object of one answer begins with.

    Args:
        id: of the answer. object: its kind. model: name that the request used. fingerprint: of the server.
    """

    id: str
    object: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[Any], **more: Any) -> dict[str, Any]:
        """Return an answer, or one chunk of it."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


def make_id(prefix: str, request: SamplingFields) -> str:
    """Return the id of an answer."""
    return f"{prefix}-{request.request_id or uuid.uuid4().hex}"


def json_response(data: Any, headers: dict[str, str]) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(data), media_type="application/json", headers=headers)


class ChunkWriter:
    """Encodes chunks of a stream, with usage where it was asked for.

    Args:
        head: of the chunks. request: says which usage is wanted.
    """

    def __init__(self, head: Head, request: SamplingFields) -> None:
        options = request.stream_options
        self._head = head
        self._at_end = options is not None and options.include_usage
        self._always = options is not None and options.continuous_usage_stats
        self.usage = Usage()

    def chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        """Return a chunk of one choice."""
        return sse.event(self._head.wrap([choice], **more, **self._usage()))

    def end(self) -> bytes:
        """Return what comes behind the last choice."""
        if not self._at_end:
            return sse.DONE
        return sse.event(self._head.wrap([], usage=self.usage.to_dict())) + sse.DONE

    def _usage(self) -> dict[str, Any]:
        if self._always:
            return {"usage": self.usage.to_dict()}
        return {"usage": None} if self._at_end else {}


class ChoiceStream:
    """A stream of chunks. Subclasses write the chunks of one output.

    Args:
        generation: started. writer: of the chunks. path: of the request, for the shape of errors. scored: the request
            asked for no tokens, so that the one that the engine makes is left out.
    """

    def __init__(self, generation: Generation, writer: ChunkWriter, path: str, *, scored: bool) -> None:
        self._generation = generation
        self._path = path
        self._seen: set[int] = set()
        self._over: set[tuple[int, int]] = set()
        self.writer = writer
        self.scored = scored

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events. An error becomes the last one."""
        try:
            async for job, output in self._generation.outputs():
                chunks = self._chunks(job, output)
                if chunks:
                    yield b"".join(chunks)
            yield self.writer.end()
        except Exception as error:
            yield errors.shape_of(self._path).event(errors.fault_of(error))
        finally:
            self._generation.close()

    def begin(self, job: int, output: RequestOutput) -> list[bytes]:
        """Return the chunks before the first output of a job."""
        raise NotImplementedError

    def step(self, job: int, output: RequestOutput, completion: CompletionOutput) -> list[bytes]:
        """Return the chunks of what is new in a choice."""
        raise NotImplementedError

    def _chunks(self, job: int, output: RequestOutput) -> list[bytes]:
        chunks: list[bytes] = []
        if job not in self._seen:
            self._seen.add(job)
            self.writer.usage.prompt += len(output.prompt_token_ids)
            chunks += self.begin(job, output)
        for completion in output.outputs:
            if (job, completion.index) not in self._over:
                chunks += self._news(job, output, completion)
        if output.finished:
            self.writer.usage.cached += output.num_cached_tokens
        return chunks

    def _news(self, job: int, output: RequestOutput, completion: CompletionOutput) -> list[bytes]:
        if not self.scored:
            self.writer.usage.completion += len(completion.token_ids)
        if completion.finish_reason is not None:
            self._over.add((job, completion.index))
        elif not completion.text and not completion.token_ids:
            return []
        return self.step(job, output, completion)


def finish(completion: CompletionOutput, *, scored: bool) -> dict[str, Any]:
    """Return why a choice ended."""
    if scored:
        return {"finish_reason": "length", "stop_reason": None}
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
