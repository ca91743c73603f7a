"""What the server needs of an engine. :class:`jackfield.AsyncLLM` has it; tests bring their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from jackfield.config import EngineConfig
from jackfield.engine.input_processor import Prompt
from jackfield.engine.outputs import RequestOutput
from jackfield.metrics import EngineMetrics
from jackfield.oracle.report import DecisionReport
from jackfield.protocol import SamplingParams
from jackfield.tokenizer import Tokenizer


class Engine(Protocol):
    """A model behind an event loop."""

    @property
    def report(self) -> DecisionReport:
        """What was decided, and why."""

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids that a prompt may hold are below this."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError when the engine runs without one."""

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The model's sampling defaults, overlaid with the configuration's ``generation``."""

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the model's own sampling defaults with changes. Raises RequestError for wrong names and values."""

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs of a request. Raises RequestError and EngineDeadError."""

    async def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ones are left alone."""

    def metrics(self) -> EngineMetrics:
        """Return totals, and how things stand."""

    def add_routes(self, app: Any, allowed: tuple[str, ...]) -> None:
        """Let the hook plugins named in ``allowed`` add routes to ``app``. Raises ConfigError for unknown names."""

    async def shutdown(self) -> None:
        """Stop the engine."""
