"""An engine in a process of its own: pause, abort, metrics, cache events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engine_world import SETTINGS, greedy, ids_of, prompt, start, write_model

from jackfield import AsyncLLM
from jackfield.errors import EngineDeadError
from jackfield.interfaces import BlocksStored, hookimpl

Test = Callable[[AsyncLLM], Awaitable[None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("tiny"))


def serve(model: str, test: Test, **settings: Any) -> None:
    async def whole() -> None:
        llm = await AsyncLLM.start(model, **{**SETTINGS, **settings})
        try:
            await asyncio.wait_for(test(llm), 120)
        finally:
            await llm.shutdown()

    asyncio.run(whole())


async def collect(llm: AsyncLLM, seed: int, tokens: int, name: str | None = None) -> tuple[list[int], str | None]:
    last: Any = None
    async for output in llm.generate({"prompt_token_ids": prompt(seed, 20)}, greedy(tokens), name):
        last = output.outputs[0]
    return last.token_ids, last.finish_reason


@pytest.mark.parametrize("overlapped", [False, True])
def test_pause_resume_abort_and_metrics(model: str, overlapped: bool) -> None:
    expected = ids_of(start(model), [prompt(seed, 20) for seed in range(6)], greedy(60))

    async def test(llm: AsyncLLM) -> None:
        assert llm.metrics().free_blocks == SETTINGS["num_blocks"] - 1
        running = [asyncio.create_task(collect(llm, seed, 60, f"r{seed}")) for seed in range(5)]
        while llm.metrics().generation_tokens < 12:
            await asyncio.sleep(0.005)
        await llm.pause()
        told = llm.metrics()
        assert (told.running, told.running + told.waiting) == (4, 5)
        late = asyncio.create_task(collect(llm, 5, 60, "late"))
        for name in ("r4", "r4", "nobody"):
            await llm.abort(name)
        assert (await running[4])[1] == "abort"
        await llm.abort("r4")
        await asyncio.sleep(0.2)
        assert llm.metrics().generation_tokens == told.generation_tokens, "a step ran while paused"
        assert not late.done()
        await asyncio.gather(llm.resume(), llm.pause(), llm.resume())
        results = await asyncio.gather(*running[:4], late)
        assert results == [(ids, "length") for ids in (*expected[:4], expected[5])]
        while llm.metrics().free_blocks < SETTINGS["num_blocks"] - 1:
            await asyncio.sleep(0.005)
        metrics = llm.metrics()
        assert (metrics.running, metrics.waiting) == (0, 0)
        assert metrics.finished == {"length": 5, "abort": 1}

    serve(model, test, async_scheduling=overlapped)


def test_a_dead_engine_answers_a_pause_with_an_error(model: str) -> None:
    async def test(llm: AsyncLLM) -> None:
        await llm.pause()
        llm._host.process.kill()
        with pytest.raises(EngineDeadError):
            await llm.resume()
        with pytest.raises(EngineDeadError):
            await llm.pause()
        await llm.abort("nobody")

    serve(model, test)


def test_listeners_of_the_frontend_hear_cache_events_and_steps(model: str) -> None:
    stored: list[int] = []
    steps: list[int] = []

    class Listener:
        @hookimpl
        def kv_events(self, events: Any) -> None:
            stored.extend(len(event.hashes) for event in events if isinstance(event, BlocksStored))

        @hookimpl
        def step_finished(self, stats: Any) -> None:
            steps.append(len(stats.events))

    async def test(llm: AsyncLLM) -> None:
        llm._prepared.hooks.add(Listener(), "listener")
        ids, _ = await collect(llm, 1, 13)
        assert len(ids) == 13
        assert sum(stored) == (20 + 13 - 1) // SETTINGS["block_size"]
        assert sum(steps) == 13

    serve(model, test, kv_events=True)
