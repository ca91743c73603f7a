"""A launched step, and how its result reaches the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jackfield.interfaces import StreamApi
from jackfield.protocol import ModelRunnerOutput
from jackfield.protocol.requests import TokenLogprobs


@dataclass(slots=True)
class PendingStep:
    """A step that was launched.

    Args:
        finish: makes the result from data that is on the host once ``event`` has happened.
        event, stream_api: None where work is synchronous. leads: whether another round of its sequences may be launched
            before the result is known.
    """

    finish: Callable[[], ModelRunnerOutput]
    event: Any = None
    stream_api: StreamApi | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    failures: dict[int, str] | None = None
    leads: bool = False

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its result."""
        if self.stream_api is not None:
            self.stream_api.synchronize(self.event)
        output = self.finish()
        output.prompt_logprobs, output.failures = self.prompt_logprobs, self.failures
        return output
