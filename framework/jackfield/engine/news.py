"""Who hears of steps and of requests that ended: hook plugins and metrics. The same for all frontends."""

from __future__ import annotations

from jackfield.engine.outputs import RequestOutput
from jackfield.interfaces import CacheEvent
from jackfield.metrics import MetricsCollector
from jackfield.metrics.collector import FinishedRequest
from jackfield.protocol import EngineCoreOutput
from jackfield.registry import HookBus


class News:
    """Passes news on.

    Args:
        hooks: the listeners. free_blocks: of the KV cache at the start. per_token: count times between tokens, which
            costs something for every token.
    """

    def __init__(self, hooks: HookBus, free_blocks: int, *, per_token: bool = True) -> None:
        self._hooks = hooks
        self.metrics = MetricsCollector(free_blocks, per_token=per_token)

    def step(self, output: EngineCoreOutput) -> None:
        """Tell of a step."""
        self.metrics.step(output)
        self._hooks.emit("step_finished", stats=output)
        self.kv_events(output.kv_events)

    def kv_events(self, events: list[CacheEvent]) -> None:
        """Tell what happened to the prefix cache, if anything did."""
        if events:
            self._hooks.emit("kv_events", events=events)

    def request(self, output: RequestOutput) -> None:
        """Tell of a request, if it is over."""
        if not output.finished:
            return
        reason, times = output.outputs[0].finish_reason or "", output.metrics
        count = FinishedRequest(
            reason,
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            times.arrival,
            times.first_token,
            times.last_token,
            times.scheduled,
        )
        self.metrics.finish(count)
        self._hooks.emit("request_finished", request_id=output.request_id, finish_reason=reason, stats=times)
