"""How a server ends: drained, forced, out of time, or because the engine died."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import cast

import pytest
from asgi import run

from jackfield.server.engine_view import Engine
from jackfield.server.operations import drain
from jackfield.server.operations.drain import Outcome, StopSignals, first_of, supervise
from jackfield.server.operations.lifetime import Lifetimes


class FakeEngine:
    def __init__(self) -> None:
        self.is_running = True


class World:
    """A server without HTTP: requests are tasks that last until they are let go."""

    def __init__(self) -> None:
        self.engine, self.lifetimes, self.signals = FakeEngine(), Lifetimes(), StopSignals()
        self.ended: list[str] = []

    def supervise(self, drain_timeout_s: float) -> asyncio.Task[Outcome]:
        engine = cast(Engine, self.engine)
        return asyncio.create_task(supervise(engine, self.lifetimes, self.signals, drain_timeout_s))

    async def request(self, done: asyncio.Event, name: str) -> None:
        timer = asyncio.timeout(None)
        try:
            async with timer:
                with self.lifetimes.living(timer):
                    await done.wait()
            self.ended.append(f"{name} finished")
        except TimeoutError:
            self.ended.append(f"{name} cut")


async def outcome(task: asyncio.Task[Outcome]) -> Outcome:
    return await asyncio.wait_for(task, 5)


def test_nothing_ends_without_a_reason() -> None:
    async def check() -> None:
        world = World()
        task = world.supervise(30)
        await asyncio.sleep(0.05)
        assert not task.done() and world.lifetimes.refusal is None
        task.cancel()

    run(check())


def test_an_idle_server_ends_at_the_first_signal() -> None:
    async def check() -> None:
        world = World()
        task = world.supervise(30)
        world.signals.notice()
        assert await outcome(task) is Outcome.DRAINED
        assert world.lifetimes.refusal is not None

    run(check())


def test_running_requests_finish() -> None:
    async def check() -> None:
        world, done = World(), asyncio.Event()
        request = asyncio.create_task(world.request(done, "a"))
        task = world.supervise(30)
        world.signals.notice()
        await asyncio.sleep(0.05)
        assert world.lifetimes.refusal is not None and not task.done()
        done.set()
        assert await outcome(task) is Outcome.DRAINED
        await request
        assert world.ended == ["a finished"]

    run(check())


@pytest.mark.parametrize(("signals", "limit", "expected"), [(1, 0.05, Outcome.DRAINED), (2, 30, Outcome.FORCED)])
def test_running_requests_are_cut(signals: int, limit: float, expected: Outcome) -> None:
    async def check() -> None:
        world = World()
        requests = [asyncio.create_task(world.request(asyncio.Event(), name)) for name in "ab"]
        task = world.supervise(limit)
        await asyncio.sleep(0.01)
        for _ in range(signals):
            world.signals.notice()
        assert await outcome(task) is expected
        await asyncio.gather(*requests)
        assert sorted(world.ended) == ["a cut", "b cut"]

    run(check())


@pytest.mark.parametrize("draining", [False, True])
def test_a_dead_engine_ends_the_server_after_answers(draining: bool) -> None:
    async def check() -> None:
        world, answered = World(), asyncio.Event()
        request = asyncio.create_task(world.request(answered, "a"))
        task = world.supervise(30)
        await asyncio.sleep(0.01)
        if draining:
            world.signals.notice()
            await asyncio.sleep(0.01)
        world.engine.is_running = False
        await asyncio.sleep(2 * drain.ENGINE_LOOK_SECONDS)
        assert not task.done()
        answered.set()
        assert await outcome(task) is Outcome.ENGINE_DIED
        await request

    run(check())


def test_requests_that_do_not_end_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "ANSWER_SECONDS", 0.05)

    async def stubborn(world: World, done: asyncio.Event) -> None:
        with world.lifetimes.living(asyncio.timeout(None)):
            await done.wait()

    async def check() -> None:
        world, done = World(), asyncio.Event()
        request = asyncio.create_task(stubborn(world, done))
        await asyncio.sleep(0)
        task = world.supervise(30)
        world.engine.is_running = False
        assert await outcome(task) is Outcome.ENGINE_DIED
        done.set()
        await request

    run(check())


def test_signals_are_heard_and_let_go() -> None:
    before = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))

    async def check() -> tuple[bool, bool]:
        signals = StopSignals()
        with signals.listening():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(signals.first.wait(), 5)
            first_only = not signals.second.is_set()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(signals.second.wait(), 5)
        return first_only, signals.second.is_set()

    assert run(check()) == (True, True)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_first_wait_to_end_is_told() -> None:
    async def fail() -> None:
        raise ValueError("wait")

    async def check() -> None:
        forever = asyncio.Event()
        assert await first_of(forever.wait(), asyncio.sleep(0)) == 1
        assert await first_of(forever.wait(), timeout=0.01) is None
        with pytest.raises(ValueError, match="wait"):
            await first_of(forever.wait(), fail())

    run(check())
