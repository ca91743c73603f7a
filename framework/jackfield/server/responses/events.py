"""Events of a response, numbered and in the order that clients expect."""

from __future__ import annotations

from typing import Any

from jackfield.engine.outputs import RequestOutput
from jackfield.server import sse
from jackfield.server.responses.answer import Answer


class EventWriter:
    """Writes the events of one response as server-sent ones.

    Args:
        answer: that grows.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._number = 0
        self._queued = answer.status == "queued"
        self._begun = False

    def begin(self) -> list[bytes]:
        """Return what comes before anything is computed."""
        second = "response.queued" if self._queued else "response.in_progress"
        return [self._whole("response.created"), self._whole(second)]

    def step(self, output: RequestOutput) -> list[bytes]:
        """Return what an output brings; it is added to the answer."""
        text, logprobs = self._answer.take(output)
        made = [] if self._begun else self._first()
        self._begun = True
        if text or logprobs:
            made.append(self._inside("response.output_text.delta", delta=text, logprobs=logprobs))
        return [*made, *self._last()] if self._answer.over else made

    def failed(self) -> list[bytes]:
        """Return the end of a response that failed."""
        return [self._whole("response.failed")]

    def _first(self) -> list[bytes]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        status: dict[str, Any] = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        queued = [self._whole("response.in_progress", **status)] if self._queued else []
        return [
            *queued,
            self._event("response.output_item.added", output_index=0, item=self._answer.head()),
            self._inside("response.content_part.added", part=part),
        ]

    def _last(self) -> list[bytes]:
        answer = self._answer
        return [
            self._inside("response.output_text.done", text=answer.text, logprobs=answer.logprobs),
            self._inside("response.content_part.done", part=answer.part()),
            self._event("response.output_item.done", output_index=0, item=answer.item()),
            self._whole(f"response.{answer.status}"),
        ]

    def _whole(self, kind: str, **changes: Any) -> bytes:
        return self._event(kind, response={**self._answer.response(), **changes})

    def _inside(self, kind: str, **data: Any) -> bytes:
        return self._event(kind, item_id=self._answer.item_id, output_index=0, content_index=0, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        number = self._number
        self._number += 1
        return sse.named_event(kind, {"type": kind, "sequence_number": number, **data})
