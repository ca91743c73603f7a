"""Reports about other engines, as tests of this one: prefix cache, scheduler, windows, aborts.

A test is named after its report in a public tracker, which the docstring cites; each shows what is right.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engines import Engine, Models
from hf import WINDOW, assert_equal, assert_logprobs, random_prompts

from jackfield import LLM, AsyncLLM, SamplingParams
from jackfield.engine.outputs import RequestOutput
from jackfield.errors import EngineDeadError
from jackfield.protocol import EngineCoreOutput

PROMPT = random_prompts((20,), seed=8)[0]


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **changes})


def ids(llm: LLM, prompt: list[int] = PROMPT, **changes: Any) -> list[int]:
    found: list[int] = llm.generate([prompt], greedy(**changes))[0].outputs[0].token_ids
    return found


def test_l172_a_repeated_prompt_gets_the_same_answer(engine: Engine, models: Models) -> None:
    """vllm-project/vllm#7845: answers drifted once the prompt came out of the prefix cache."""
    llm = engine(models["llama"].folder, block_size=8)
    runs = [llm.generate([PROMPT * 2], greedy(logprobs=1))[0] for _ in range(5)]
    assert [run.num_cached_tokens for run in runs] == [0, *[32] * 4]
    assert all(run.outputs[0].token_ids == runs[0].outputs[0].token_ids for run in runs)
    assert all(run.outputs[0].logprobs == runs[1].outputs[0].logprobs for run in runs[1:])
    for run in runs[:2]:
        assert_logprobs(models["llama"].model, PROMPT * 2, run.outputs[0], 1)


def count_preemptions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the slot of every preemption."""
    scheduler = llm._core.scheduler
    preempt, slots = scheduler._preempt, list[int]()

    def counted(slot: int) -> None:
        slots.append(slot)
        preempt(slot)

    monkeypatch.setattr(scheduler, "_preempt", counted)
    return slots


@pytest.mark.parametrize("overlapped", [False, True])
def test_m178_long_prompts_in_a_small_cache_make_progress(
    engine: Engine, models: Models, monkeypatch: pytest.MonkeyPatch, overlapped: bool
) -> None:
    """vllm-project/vllm#21809: prompts were started and preempted without end."""
    llm = engine(
        models["llama"].folder, block_size=8, num_blocks=27, max_model_len=120, max_num_batched_tokens=32,
        enable_prefix_caching=False, async_scheduling=overlapped,
    )  # fmt: skip
    preempted = count_preemptions(llm, monkeypatch)
    prompts = random_prompts([95, 96, 97, 98])
    outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(max_tokens=20))]
    assert_equal(models["llama"].model, prompts, outputs)
    assert len(preempted) <= 4


def test_m180_many_completions_in_a_small_cache_all_end(
    engine: Engine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-project/vllm#5578: completions of one request starved each other."""
    settings = {"block_size": 4, "max_model_len": 40, "num_blocks": 14}
    llm = engine(models["llama"].folder, **settings)
    preempted = count_preemptions(llm, monkeypatch)
    params = greedy(n=8, temperature=1.0, seed=4, max_tokens=18)
    found = [completion.token_ids for completion in llm.generate([PROMPT], params)[0].outputs]
    assert preempted, "the cache is too small for all at once"
    roomy = engine(models["llama"].folder)
    assert found == [completion.token_ids for completion in roomy.generate([PROMPT], params)[0].outputs]


def test_m182_the_budget_holds_when_parts_of_prompts_are_cached(
    engine: Engine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA/TensorRT-LLM#13318: with partial reuse a step was a few tokens too large, and the loop died of it."""
    llm = engine(models["llama"].folder, block_size=4, max_num_batched_tokens=19, max_num_seqs=6)
    sizes, launch = list[int](), llm._core._executor.launch

    def measured(plan: Any) -> Any:
        sizes.append(plan.num_tokens)
        return launch(plan)

    monkeypatch.setattr(llm._core._executor, "launch", measured)
    prompts = [PROMPT[:size] + tail for size in (20, 13, 7) for tail in random_prompts((1, 6, 17), seed=size)]
    for _ in range(2):
        outputs = llm.generate(prompts, greedy(max_tokens=5))
        assert_equal(models["llama"].model, prompts, [output.outputs[0].token_ids for output in outputs])
    assert max(sizes) == 19
    assert all(0 < o.num_cached_tokens < len(ids) for o, ids in zip(outputs, prompts, strict=True)), "parts were reused"


def test_m182_an_engine_that_failed_says_so_to_everybody(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA/TensorRT-LLM#13318: the loop was dead, and requests waited for ever."""
    llm = LLM(str(models["llama"].folder), skip_tokenizer_init=True, max_num_seqs=4, kv_cache_memory="16MiB")

    def fail(plan: Any) -> Any:
        raise RuntimeError("a broken device")

    monkeypatch.setattr(llm._core._executor, "launch", fail)
    with pytest.raises(EngineDeadError, match="RuntimeError: a broken device"):
        ids(llm)
    with pytest.raises(EngineDeadError, match="the engine stopped earlier"):
        ids(llm)


@pytest.mark.parametrize("length", [1, 7, 8, 16, 24])
def test_m184_of_a_prompt_that_is_cached_whole_something_is_computed(
    engine: Engine, models: Models, length: int
) -> None:
    """vllm-project/vllm#12065: the bookkeeping of the last block went wrong when all of it was cached."""
    llm = engine(models["llama"].folder, block_size=8)
    prompt = random_prompts((length,), seed=6)[0]
    first, second = (llm.generate([prompt], greedy(logprobs=2, max_tokens=10))[0] for _ in range(2))
    assert second.num_cached_tokens == (length - 1) // 8 * 8
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert_logprobs(models["llama"].model, prompt, second.outputs[0], 2)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("block_size", [1, 7, 8, WINDOW, 64])
def test_n186_answers_go_on_past_the_window(engine: Engine, models: Models, block_size: int, caching: bool) -> None:
    """EricLBuehler/mistral.rs#246: the cache was not cut at the window."""
    # Without prefix caching a block that was freed is the first to be taken again.
    llm = engine(models["mistral"].folder, block_size=block_size, enable_prefix_caching=caching)
    prompts = random_prompts((1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 5, 100), seed=2)
    outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(max_tokens=2 * WINDOW + 9))]
    assert_equal(models["mistral"].model, prompts, outputs)


def test_n188_a_prompt_longer_than_the_window_stays_the_same(engine: Engine, models: Models) -> None:
    """ovg-project/kvcached#446: of four equal prompts the last two got other answers."""
    llm = engine(models["mistral"].folder, block_size=8)
    prompt = random_prompts((3 * WINDOW + 2,), seed=5)[0]
    runs = [llm.generate([prompt], greedy(max_tokens=10))[0] for _ in range(4)]
    assert [run.num_cached_tokens for run in runs] == [0, *[72] * 3]
    assert_equal(models["mistral"].model, [prompt] * 4, [run.outputs[0].token_ids for run in runs])


@pytest.mark.parametrize("at", [WINDOW, 2 * WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("threshold", [0, 1, 5])
def test_n190_positions_at_multiples_of_the_window_are_exact(
    engine: Engine, models: Models, at: int, threshold: int
) -> None:
    """quic/efficient-transformers#1235: at the wrap of a ring stale entries were read."""
    llm = engine(models["mistral"].folder, block_size=8, long_prefill_token_threshold=threshold)
    prompts = random_prompts((at - 1, at, at + 1), seed=at)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(max_tokens=3, logprobs=3)), strict=True):
        assert_logprobs(models["mistral"].model, prompt, output.outputs[0], 3)


def test_u249_aborts_of_ended_unknown_and_aborted_requests_do_nothing(engine: Engine, models: Models) -> None:
    """xorbitsai/inference#5548: what a second abort does was undefined."""
    llm = engine(models["llama"].folder)
    expected = ids(llm)
    ended, running = llm.enqueue([*PROMPT], greedy()), llm.enqueue([*PROMPT, 3], greedy())
    llm._advance()
    for _ in range(2):
        llm.abort(running)
    llm.abort("nobody")
    done, aborted = llm.wait_for_completion()
    assert (done.outputs[0].token_ids, aborted.outputs[0].finish_reason) == (expected, "abort")
    for name in (ended, running):
        llm.abort(name)
    assert ids(llm) == expected


def test_u245_leaving_a_stream_ends_all_its_completions(models: Models) -> None:
    """vllm-project/vllm#14326: the children of a request that was left ran on, and their entries leaked."""

    async def leave() -> None:
        settings: dict[str, Any] = {"num_blocks": 200, "block_size": 8, "max_num_seqs": 8, "max_model_len": 512}
        llm = await AsyncLLM.start(str(models["llama"].folder), skip_tokenizer_init=True, **settings)
        seen, process = list[EngineCoreOutput](), llm._outputs.process

        def watched(output: EngineCoreOutput) -> tuple[list[RequestOutput], list[str]]:
            seen.append(output)
            return process(output)

        llm._outputs.process = watched  # type: ignore[method-assign]
        try:
            endless = SamplingParams(n=2, temperature=1.0, ignore_eos=True, max_tokens=450, detokenize=False)
            chunks = 0
            stream = llm.generate({"prompt_token_ids": PROMPT}, endless, "left")
            async for output in stream:
                assert not output.finished
                chunks += 1
                if chunks == 2:
                    break
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
            for name in ("left", "left", "nobody"):
                await llm.abort(name)
            last = [o async for o in llm.generate({"prompt_token_ids": PROMPT}, greedy(max_tokens=8))][-1]
            assert last.finished and len(last.outputs[0].token_ids) == 8
            assert (seen[-1].running, seen[-1].waiting, seen[-1].free_blocks) == (0, 0, 199)
            assert max(o.running for o in seen) >= 2 and not llm._queues
            assert llm._outputs.num_requests() == 0 and not llm._outputs._owner
        finally:
            await llm.shutdown()

    asyncio.run(asyncio.wait_for(leave(), 60))
