"""A benchmark of a server: prepare prompts, warm up, and measure under one load after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jackfield.benchmarking.datasets import Dataset
from jackfield.benchmarking.load import Load, Outcome, run_load
from jackfield.benchmarking.prompts import Sample
from jackfield.benchmarking.requests import RequestPlan
from jackfield.client.connection import Connection
from jackfield.client.errors import AnswerError, BrokenAnswerError
from jackfield.client.wire import Wire
from jackfield.errors import ConfigError

OnEnd = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What a benchmark of a server does.

    Args:
        model: as the server calls it; its first one when None. fields: further fields of every request. warmup:
            requests before anything is measured. loads: one run each.
    """

    dataset: Dataset
    loads: tuple[Load, ...]
    endpoint: str
    model: str | None = None
    warmup: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ConfigError("must be at least 0", field="--warmup", value=self.warmup, remedy="raise --warmup")
        RequestPlan(self.endpoint, self.model or "", self.fields)


@dataclass(slots=True)
class Ready:
    """What is known before measuring.

    Args:
        plan: of requests. turns: what to send in each run. server: what the server says of itself, as far as it does:
            ``version``, and ``decisions`` where it shows them.
    """

    plan: RequestPlan
    turns: list[list[Sample]]
    server: dict[str, Any]


async def prepare(connection: Connection, wire: Wire, settings: ServeSettings) -> Ready:
    """Find the model, make the prompts, and warm the server up.

    Raises:
        UnreachableError: nobody answers. ConfigError: the model, the data set or the endpoint is at fault, or all
            warm-up requests fail.
    """
    model = await connection.model(settings.model)
    plan = RequestPlan(settings.endpoint, model, settings.fields)
    tokenize = _tokenizer(connection, model)
    warm, *turns = await settings.dataset.turns(tokenize, 1 + len(settings.loads), text=plan.chat)
    plan.check(warm)
    server = {"version": await _optional(connection, "/version")}
    server["decisions"] = await _optional(connection, "/server/decisions")
    await _warm_up(wire, plan, warm, settings.warmup, connection.timeout_s)
    return Ready(plan, turns, {name: value for name, value in server.items() if value is not None})


async def run(
    wire: Wire, ready: Ready, loads: Sequence[Load], on_end: OnEnd = lambda: None
) -> list[tuple[Load, Outcome]]:
    """Run the loads one after another and return what came of each. An interruption ends the run under way, and the
    rest are not begun.
    """
    outcomes: list[tuple[Load, Outcome]] = []
    for load, samples in zip(loads, ready.turns, strict=True):
        outcome = await run_load(wire, ready.plan, samples, load, on_end)
        outcomes.append((load, outcome))
        if outcome.interrupted:
            break
    return outcomes


def sweep(load: Load, values: str | None, by: str) -> tuple[Load, ...]:
    """Return one load for each value of a sweep (``1,2,4,8``), or ``load`` alone without one.

    Args:
        by: ``concurrency`` or ``rate``.

    Raises:
        ConfigError: the values are no numbers, or what is swept was set as well.
    """
    if values is None:
        return (load,)
    set_already = load.concurrency is not None if by == "concurrency" else load.rate != float("inf")
    flag = {"concurrency": "--max-concurrency", "rate": "--request-rate"}[by]
    if set_already:
        raise ConfigError(f"--sweep sets {flag} in each run", field=flag, value=values, remedy=f"leave {flag} out")
    numbers = list(_numbers(values, by))
    if by == "rate":
        return tuple(replace(load, rate=number) for number in numbers)
    return tuple(replace(load, concurrency=int(number)) for number in numbers)


def _numbers(values: str, by: str) -> Iterator[float]:
    for word in values.split(","):
        try:
            number = float(word) if by == "rate" else int(word)
        except ValueError:
            number = 0
        if not number > 0:
            text = "a sweep is a list of positive numbers" + ("" if by == "rate" else " without fractions")
            raise ConfigError(text, field="--sweep", value=word, remedy="write --sweep 1,2,4,8")
        yield number


def _tokenizer(connection: Connection, model: str) -> Callable[[str], Any]:
    async def tokenize(text: str) -> list[int] | None:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            answer = await connection.post("/tokenize", body)
        except (AnswerError, BrokenAnswerError):
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) and all(type(token) is int for token in tokens) else None

    return tokenize


async def _optional(connection: Connection, path: str) -> Any:
    try:
        return await connection.get(path)
    except (AnswerError, BrokenAnswerError):
        return None


async def _warm_up(wire: Wire, plan: RequestPlan, samples: list[Sample], count: int, timeout_s: float | None) -> None:
    chosen = [samples[place % len(samples)] for place in range(count)]
    outcome = await run_load(wire, plan, chosen, Load(timeout_s=timeout_s))
    if outcome.interrupted:
        raise asyncio.CancelledError
    errors = [seen.error for seen in outcome.measurements if seen.error]
    if errors and len(errors) == count:
        raise ConfigError(
            f"the server refuses such requests: {errors[0]}",
            field="--endpoint",
            value=plan.endpoint,
            remedy="change the request, or write --warmup 0 to measure all the same",
        )
