"""Calls: what the server knows of an HTTP request while it runs and when it is over."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import Scope

from jackfield.engine.outputs import RequestOutput
from jackfield.protocol import SamplingParams

PROBES = frozenset({"/health", "/ready", "/version", "/metrics"})
"""Paths that machines ask again and again: no key is needed for them and they are not logged."""


@dataclass(slots=True)
class Generation:
    """One engine request of a call.

    Args:
        n, max_tokens, temperature, top_p: as sampled. prompt_tokens, cached_tokens: 0 before the first output.
        generated: tokens of all completions. arrival, first_token, last_token: of a monotonic clock, in seconds.
        finish_reasons: of the completions that ended.
    """

    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    arrival: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finish_reasons: dict[int, str] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)
    _delta: bool = False

    @classmethod
    def of(cls, params: SamplingParams) -> Generation:
        """Return a generation that has no output yet."""
        delta = params.output_kind.name == "DELTA"
        return cls(params.n, params.max_tokens, params.temperature, params.top_p, _delta=delta)

    @property
    def generated(self) -> int:
        """Tokens of all completions so far."""
        return sum(self._counts.values())

    def note(self, output: RequestOutput) -> None:
        """Take what an output tells."""
        self.prompt_tokens, self.cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
        times = output.metrics
        self.arrival, self.first_token, self.last_token = times.arrival, times.first_token, times.last_token
        for completion in output.outputs:
            before = self._counts.get(completion.index, 0) if self._delta else 0
            self._counts[completion.index] = before + len(completion.token_ids)
            if completion.finish_reason is not None:
                self.finish_reasons[completion.index] = completion.finish_reason


@dataclass(slots=True)
class Call:
    """One HTTP request.

    Args:
        request_id: as told to the client. method, path: as asked, the path percent-encoded and without its query.
        started: of a monotonic clock; started_ns: Unix time in ns. client: address, or "". trace: the incoming
            ``traceparent`` and ``tracestate``.
        route: the pattern that fit (``/v1/responses/{id}``), or "" when none did. status: of the answer, None before it
            began. streams: the answer is a stream of server-sent events. complete: the answer was sent to its end.
            reading: the application waits for the rest of the body. left: the client closed the connection before that.
        duration: in seconds, set at the end. generations: the engine requests that it made.
    """

    request_id: str
    method: str
    path: str
    started: float
    started_ns: int
    client: str = ""
    trace: dict[str, str] = field(default_factory=dict)
    route: str = ""
    status: int | None = None
    streams: bool = False
    complete: bool = False
    reading: bool = False
    left: bool = False
    duration: float = 0.0
    generations: list[Generation] = field(default_factory=list)

    @property
    def final_status(self) -> int:
        """The status for logs and metrics: 499 when the client left before an answer, 500 when nothing answered."""
        if self.status is not None:
            return self.status
        return 499 if self.left else 500

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(generation.prompt_tokens for generation in self.generations)

    @property
    def generated(self) -> int:
        """Tokens of all completions."""
        return sum(generation.generated for generation in self.generations)


Listener = Callable[[Call], None]
"""Told of every call when it is over."""

current_call: ContextVar[Call | None] = ContextVar("jackfield_call", default=None)
"""The call that runs in this context, for logs and for the engine's side."""


def route_path(scope: Scope) -> str:
    """Return the path of a request below the prefix under which a proxy publishes the server."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "").rstrip("/")
    if root and (path == root or path.startswith(f"{root}/")):
        return path[len(root) :] or "/"
    return path


def call_of(scope: Scope) -> Call:
    """Return the call that :class:`jackfield.server.operations.observe.Observe` made for a request."""
    call = scope["jackfield.call"]
    assert isinstance(call, Call)
    return call
