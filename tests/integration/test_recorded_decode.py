"""Decode steps that are recorded on a CPU, beside steps that are launched op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, Models
from hf import assert_equal, random_prompts
from moe_models import MOE_RECIPES

from jackfield import LLM, SamplingParams
from jackfield.executor import InProcessExecutor
from jackfield.worker.model_runner import ModelRunner
from jackfield_native.toolchain import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs a C compiler: kernels in C are recorded")


def runner_of(llm: LLM) -> ModelRunner:
    executor = llm._core._executor
    assert isinstance(executor, InProcessExecutor)
    return executor.worker._runner


class Replays:
    """Counts replays of an engine's recordings."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        graphs = runner_of(llm)._parts.graphs
        assert graphs is not None
        self.graphs, self.sizes, replay = graphs, graphs.sizes, graphs.replay

        def counting(plan: Any) -> Any:
            self.count += 1
            return replay(plan)

        monkeypatch.setattr(graphs, "replay", counting)


@pytest.mark.parametrize("name", ["llama", "llama_mha", "mistral", "qwen2", "qwen3"])
def test_tokens_equal_the_reference(engine: Engine, models: Models, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, prompts = models[name], random_prompts((3, 40, 17, 90, 5, 33, 64, 8, 21, 12))
    llm = engine(tiny.folder)
    replays = Replays(llm, monkeypatch)
    assert replays.sizes == (1, 2, 4, 8) and sorted(replays.graphs._recorded) == [1]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for count in (1, 3, 8, 10):
        before = replays.count
        found = [request.outputs[0].token_ids for request in llm.generate(prompts[:count], greedy)]
        assert_equal(tiny.model, prompts[:count], found)
        assert (replays.count > before) == (count <= 8), count
    assert sorted(replays.graphs._recorded) == [1, 4, 8], "other sizes are recorded when they are met"


PARAMS = {
    "logprobs": SamplingParams(temperature=0.0, max_tokens=12, logprobs=4),
    "penalties": SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.5, presence_penalty=0.5),
    "drawn": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=7, max_tokens=12),
    "bias": SamplingParams(temperature=0.0, max_tokens=12, logit_bias={5: 3.0, 9: -100.0}, min_tokens=3),
}


@pytest.mark.parametrize("name", PARAMS)
def test_what_sampling_does_is_the_same(
    engine: Engine, models: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, prompts = engine(models["llama"].folder), random_prompts((3, 40, 17))
    replays = Replays(llm, monkeypatch)
    recorded = [request.outputs[0] for request in llm.generate(prompts, PARAMS[name])]
    assert replays.count
    runner_of(llm).forget_recordings()
    for found, wanted in zip(recorded, llm.generate(prompts, PARAMS[name]), strict=True):
        assert found.token_ids == wanted.outputs[0].token_ids
        assert found.cumulative_logprob == pytest.approx(wanted.outputs[0].cumulative_logprob, abs=1e-4)


def test_work_that_reads_numbers_is_launched_op_by_op(
    engine: Engine, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """``torch_sdpa`` looks at the slots that it writes to."""
    phases = {"phases": {"prefill": {"force": "torch_sdpa"}, "decode": {"force": "native_cpu"}}}
    tiny, prompts = models["llama"], random_prompts((30, 5))
    with caplog.at_level("INFO", logger="jackfield.worker"):
        llm = engine(tiny.folder, attention=phases)
    assert runner_of(llm)._parts.graphs is None
    assert "steps are not recorded: __bool__ gives Python numbers of a tensor" in caplog.text
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    assert_equal(tiny.model, prompts, [request.outputs[0].token_ids for request in llm.generate(prompts, greedy)])


@pytest.mark.parametrize("name", ["mixtral_window", "qwen2_moe", "qwen3_moe"])
def test_experts_too(engine: Engine, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, prompts = MOE_RECIPES[name].make(tmp_path), random_prompts((30, 5, 17))
    llm = engine(tiny.folder)
    replays = Replays(llm, monkeypatch)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for some in (prompts, prompts[1:2]):
        assert_equal(tiny.model, some, [request.outputs[0].token_ids for request in llm.generate(some, greedy)])
    assert replays.count


def test_a_size_that_cannot_be_recorded_is_launched_op_by_op(
    engine: Engine, models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model may read numbers only where there are many tokens."""
    tiny, prompts = models["llama"], random_prompts((30, 5, 17))
    llm = engine(tiny.folder)
    replays, model = Replays(llm, monkeypatch), runner_of(llm)._parts.model
    embed = model.embed

    def reading(ids_T: torch.Tensor) -> torch.Tensor:
        if len(ids_T) > 2:
            ids_T.tolist()
        return embed(ids_T)

    monkeypatch.setattr(model, "embed", reading)
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with caplog.at_level("INFO", logger="jackfield.worker"):
        for some in (prompts, prompts[:2], prompts):
            assert_equal(tiny.model, some, [request.outputs[0].token_ids for request in llm.generate(some, greedy)])
    assert caplog.text.count("steps of 4 sequences are not recorded") == 1
    assert replays.count and sorted(replays.graphs._recorded) == [1, 2]
