"""flex_attention through the engine, where the user names it."""

from __future__ import annotations

import pytest
from engines import Engine, Models
from hf import assert_equal, random_prompts

from jackfield import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_tokens_equal_the_reference(engine: Engine, models: Models, name: str) -> None:
    llm = engine(models[name].folder, block_size=8, long_prefill_token_threshold=20, **{"attention.force": "flex"})
    assert {d.plugin.name for d in llm.report.decisions if d.family == "attention_backends"} == {"flex"}
    prompts = random_prompts((3, 30, 60))
    found = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    assert_equal(models[name].model, prompts, found)


def test_nobody_gets_it_without_asking(engine: Engine, models: Models) -> None:
    llm = engine(models["llama"].folder, **{"attention.exclude": ["native_cpu"]})
    assert {d.plugin.name for d in llm.report.decisions if d.family == "attention_backends"} == {"torch_sdpa"}
