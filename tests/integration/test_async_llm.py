"""The engine in a process of its own: streams, aborts, death, shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jackfield import LLM, AsyncLLM, SamplingParams
from jackfield.errors import EngineDeadError, PluginError, RequestError
from jackfield.interfaces import Band, OpRequest, Preference
from jackfield_ops.torch_ops import TorchOps

SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "block_size": 8,
    "num_blocks": 200,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model without weights or tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@asynccontextmanager
async def engine(model: str, **changes: Any) -> AsyncIterator[AsyncLLM]:
    llm = await AsyncLLM.start(model, **{**SETTINGS, **changes})
    try:
        yield llm
    finally:
        await llm.shutdown()


def prompt(seed: int, length: int = 20) -> dict[str, Any]:
    return {"prompt_token_ids": random.Random(seed).choices(range(384), k=length)}


async def tokens(llm: AsyncLLM, seed: int, params: SamplingParams = GREEDY) -> list[int]:
    ids: list[int] = []
    async for output in llm.generate(prompt(seed), params):
        assert output.outputs[0].token_ids[: len(ids)] == ids, "a stream only grows"
        ids = output.outputs[0].token_ids
    return ids


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))  # type: ignore[arg-type]


def test_streams_of_many_requests_equal_the_engine_in_this_process(model: str) -> None:
    alone = LLM(model, **SETTINGS)
    wanted = [alone.generate([prompt(seed)], GREEDY)[0].outputs[0].token_ids for seed in range(24)]

    async def test() -> None:
        async with engine(model) as llm:
            assert await asyncio.gather(*(tokens(llm, seed) for seed in range(24))) == wanted

    run(test)


def test_a_wrong_request_fails_alone_and_the_next_one_works(model: str) -> None:
    async def test() -> None:
        async with engine(model) as llm:
            with pytest.raises(RequestError, match="outside the vocabulary"):
                async for _ in llm.generate({"prompt_token_ids": [1, 384]}, GREEDY):
                    pass
            with pytest.raises(RequestError, match="the prompt has 300 tokens"):
                async for _ in llm.generate(prompt(0, 300), GREEDY):
                    pass
            assert len(await tokens(llm, 1)) == 24

    run(test)


def test_a_thousand_requests_of_which_half_are_left_leak_nothing(model: str) -> None:
    async def test() -> None:
        async with engine(model) as llm:
            rng = random.Random(1)

            async def one(seed: int, leave_after: int | None) -> int:
                seen = 0
                async for output in llm.generate(prompt(seed, rng.randint(1, 40)), GREEDY):
                    seen = len(output.outputs[0].token_ids)
                    if leave_after is not None and seen >= leave_after:
                        break
                return seen

            plans = [rng.randint(1, 20) if rng.random() < 0.5 else None for _ in range(1000)]
            seen = await asyncio.gather(*(one(i, leave) for i, leave in enumerate(plans)))
            assert all(count == 24 for count, leave in zip(seen, plans, strict=True) if leave is None)
            await settled(llm)
            assert len(await tokens(llm, 5000)) == 24

    run(test)


async def settled(llm: AsyncLLM) -> None:
    """Wait until nothing is followed any more; a leak would make this time out."""
    deadline = time.monotonic() + 10
    while llm._outputs.num_requests() or llm._outputs._owner or llm._queues:
        assert time.monotonic() < deadline, "requests are left"
        await asyncio.sleep(0.02)


def test_a_killed_engine_fails_every_waiting_request_at_once_and_leaves_nothing(model: str) -> None:
    async def test() -> None:
        llm = await AsyncLLM.start(model, **SETTINGS)
        process, folder = llm._host.process, llm._host.folder
        endless = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
        tasks = [asyncio.create_task(tokens(llm, seed, endless)) for seed in range(40)]
        await asyncio.sleep(0.3)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - killed < 3
        dead = [r for r in results if isinstance(r, EngineDeadError)]
        assert dead and all("exit code -9" in str(r) for r in dead)
        assert all(isinstance(r, EngineDeadError) or len(r) == 200 for r in results)  # type: ignore[arg-type]
        with pytest.raises(EngineDeadError):
            await tokens(llm, 1)
        assert not llm.is_running
        await llm.shutdown()
        assert not process.is_alive() and not Path(folder).exists()

    run(test)


def test_shutdown_ends_the_process_and_what_still_runs(model: str) -> None:
    async def test() -> None:
        llm = await AsyncLLM.start(model, **SETTINGS)
        process, folder = llm._host.process, llm._host.folder
        task = asyncio.create_task(tokens(llm, 1, SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)))
        await asyncio.sleep(0.1)
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        assert process.exitcode == 0 and not folder.exists()

    run(test)


def test_several_frontends_share_an_engine(model: str) -> None:
    """They may give requests the same names; one that leaves takes its requests along and nothing else."""

    async def test() -> None:
        from jackfield.engine.host import EngineHost
        from jackfield.engine.setup import prepare

        settings = {k: v for k, v in SETTINGS.items() if k != "skip_tokenizer_init"}
        host = EngineHost(prepare(model, None, settings, skip_tokenizer_init=True), seats=3)
        host.start()
        try:
            first, second, third = await asyncio.gather(*(AsyncLLM.attach(host.seat(i)) for i in range(3)))
            alone = [await tokens(first, seed) for seed in range(6)]
            both = await asyncio.gather(*(tokens(llm, seed) for llm in (first, second, third) for seed in range(6)))
            assert both == alone * 3
            endless = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
            left = asyncio.create_task(tokens(second, 1, endless))
            await asyncio.sleep(0.1)
            await second.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await left
            assert await tokens(first, 3) == alone[3]
            await first.pause()
            await first.resume()
            host.process.kill()
            for llm in (first, third):
                with pytest.raises(EngineDeadError):
                    await tokens(llm, 2, endless)
                await llm.shutdown()
        finally:
            host.close()
        assert not host.folder.exists()

    run(test)


def test_more_requests_than_may_wait_are_refused_early(model: str) -> None:
    async def test() -> None:
        async with engine(model, max_num_seqs=2, max_waiting=3) as llm:
            results = await asyncio.gather(*(tokens(llm, seed) for seed in range(9)), return_exceptions=True)
            refused = [r for r in results if isinstance(r, RequestError)]
            assert len(refused) == 4 and all(r.field == "scheduler.max_waiting" for r in refused)
            assert sum(isinstance(r, list) and len(r) == 24 for r in results) == 5

    run(test)


def test_an_engine_that_cannot_start_says_why(model: str) -> None:
    async def test() -> None:
        with pytest.raises(EngineDeadError, match="KV cache holds 8 tokens"):
            await AsyncLLM.start(model, **{**SETTINGS, "num_blocks": 2})

    run(test)


def test_a_plugin_of_this_process_cannot_serve_another_one(model: str) -> None:
    class LocalOps(TorchOps):
        name = "local"

        @classmethod
        def preference(cls, request: OpRequest) -> Preference:
            return Preference(Band.BEST, "here")

    from jackfield.engine.setup import prepare

    settings = {k: v for k, v in SETTINGS.items() if k != "skip_tokenizer_init"}
    prepared = prepare(model, None, settings, plugins=[LocalOps], skip_tokenizer_init=True)
    with pytest.raises(PluginError, match="entry point"):
        prepared.manifest()


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(model: str) -> None:
    async def run() -> None:
        async with engine(model) as llm:
            # A lone surrogate is no text that a message can carry.
            wrong = SamplingParams(temperature=0, max_tokens=4, extra_args={"word": "\udc80"}, detokenize=False)
            with pytest.raises(RequestError, match="cannot be sent to the engine"):
                async for _ in llm.generate({"prompt_token_ids": [1, 2]}, wrong, request_id="one"):
                    pass
            outputs = [o async for o in llm.generate({"prompt_token_ids": [1, 2]}, GREEDY, request_id="one")]
            assert outputs[-1].finished
            assert llm._queues == {} and llm._outputs.num_requests() == 0

    asyncio.run(run())
