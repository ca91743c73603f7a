"""What a benchmark sends for each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jackfield.benchmarking.prompts import Sample
from jackfield.errors import ConfigError, did_you_mean

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = (COMPLETIONS, CHAT)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """How prompts become requests.

    Args:
        endpoint: one of :data:`ENDPOINTS`. model: as the server calls it. fields: further fields of every request.

    Raises:
        ConfigError: the endpoint is unknown.
    """

    endpoint: str
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            remedy = did_you_mean(self.endpoint, ENDPOINTS) or f"endpoints are {', '.join(ENDPOINTS)}"
            raise ConfigError("unknown endpoint", field="--endpoint", value=self.endpoint, remedy=remedy)

    @property
    def chat(self) -> bool:
        """Whether requests are conversations."""
        return self.endpoint == CHAT

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise when the endpoint cannot take some of the prompts.

        Raises:
            ConfigError: conversations for completions, or token ids for chats.
        """
        kinds = {"messages" if sample.messages is not None else type(sample.prompt).__name__ for sample in samples}
        wrong = {"messages": "conversations", "list": "token ids"}["list" if self.chat else "messages"]
        if ("list" if self.chat else "messages") in kinds:
            other = COMPLETIONS if self.chat else CHAT
            text = f"{self.endpoint} does not take {wrong}, which the data set holds"
            raise ConfigError(text, field="--endpoint", value=self.endpoint, remedy=f"write --endpoint {other}")

    def body(self, sample: Sample) -> dict[str, Any]:
        """Return the body of a streamed request."""
        limit = {} if sample.output_len is None else {"max_tokens": sample.output_len}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **self._prompt(sample), **limit, **stream, **self.fields}

    def _prompt(self, sample: Sample) -> dict[str, Any]:
        if not self.chat:
            return {"prompt": sample.prompt}
        return {"messages": sample.messages or [{"role": "user", "content": sample.prompt}]}
