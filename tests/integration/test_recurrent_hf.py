"""Models with states against HF transformers: whole, in chunks, from a prefix, preempted, in mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from hf import Tiny, assert_equal, changed_copy, random_prompts
from recurrent_models import RECIPES
from safetensors.torch import load_file
from test_models_hf import check_logprobs

from jackfield import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
LENGTHS = (1, 3, 16, 70)


STARTED_AT_NOTHING = ("e_score_correction_bias", "expert_bias", "forget_gate.A_log", "forget_gate.dt_bias")
"""Biases of the choice of experts, and what makes decays: transformers starts them where they do nothing."""


def make(name: str, folder: Path) -> Tiny:
    """Make a model whose parts all do something."""
    tiny = RECIPES[name].make(folder)
    found = [t for key, t in tiny.model.state_dict().items() if key.endswith(STARTED_AT_NOTHING)]
    with torch.no_grad():
        for tensor in found:
            tensor.normal_(0.0, 0.3)
    if found:
        tiny.model.save_pretrained(folder)
    return tiny


@pytest.mark.parametrize("name", RECIPES)
def test_logits_and_tokens_equal_the_reference(engine: Engine, tmp_path: Path, name: str) -> None:
    tiny = make(name, tmp_path)
    llm = engine(tiny.folder, long_prefill_token_threshold=7, max_num_seqs=8)
    check_logprobs(llm, tiny, random_prompts((40,), seed=3)[0])
    prompts = random_prompts(LENGTHS)
    batch = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    assert [len(output) for output in batch] == [32] * len(prompts)
    assert_equal(tiny.model, prompts, batch)


CHUNKS = [
    *((name, chunk) for name in ("mamba", "mamba2") for chunk in (1, 7, 64, 512)),
    *((name, 1) for name in ("lfm2", "falcon-h1-factors")),
    *((name, 7) for name in ("jamba", "nemotron-h-latent", "falcon-h1", "minimax", "kimi-linear", "lfm2")),
    *((name, 64) for name in ("olmo-hybrid", "qwen3.5", "zamba2")),
]


@pytest.mark.parametrize(("name", "chunk"), CHUNKS)
def test_chunks_prefixes_and_preemption_change_nothing(engine: Engine, tmp_path: Path, name: str, chunk: int) -> None:
    tiny = make(name, tmp_path)
    llm = engine(tiny.folder, long_prefill_token_threshold=chunk, block_size=16, max_num_seqs=4)
    prompts = random_prompts((50, 90))
    first = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    assert_equal(tiny.model, prompts, first)
    longer = [[*prompt, *output, 5] for prompt, output in zip(prompts, first, strict=True)]
    again = llm.generate(longer, GREEDY)
    # What was computed while the first answers were made can be gone on from, at the last full block.
    assert all((request.num_cached_tokens or 0) >= 48 for request in again)
    assert_equal(tiny.model, longer, [request.outputs[0].token_ids for request in again])
    few = 6 if name in ("mamba", "mamba2") else 24
    small = engine(tiny.folder, block_size=16, num_blocks=few, max_model_len=128, long_prefill_token_threshold=chunk)
    many = random_prompts((40, 60, 30, 70, 20), seed=9)
    outputs = [request.outputs[0].token_ids for request in small.generate(many, GREEDY)]
    assert small._core.scheduler.counters.preemptions
    assert_equal(tiny.model, many, outputs)


WRONG: dict[str, dict[str, Any]] = {
    "mamba2-limits": {"time_step_limit": [0.3, 0.901]},
    "jamba": {"rms_norm_eps": 1e-4},
    "bamba": {"rope_theta": 10500.0, "rope_parameters": None},
    "granite-hybrid": {"attention_multiplier": 0.302},
    "nemotron-h-moe": {"routed_scaling_factor": 1.51},
    "falcon-h1-factors": {"ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.702]},
    "minimax": {"linear_attn_beta_factor": 0.901},
    "kimi-linear": {"routed_scaling_factor": 2.45},
    "bailing-hybrid": {"kda_lower_bound": -5.5},
    "olmo-hybrid": {"linear_allow_neg_eigval": False},
    "lfm2": {"norm_eps": 1e-3},
    "zamba2": {"time_step_min": 0.0105},
}
"""Of each model, something that is slightly off."""


@pytest.mark.parametrize("name", WRONG)
def test_what_is_slightly_wrong_is_noticed(engine: Engine, tmp_path: Path, name: str) -> None:
    """Without this the checks above would hold for nothing."""
    tiny = make(name, tmp_path / "model")
    wrong = changed_copy(tiny.folder, tmp_path / "wrong", **WRONG[name])
    with pytest.raises(AssertionError):
        check_logprobs(engine(Path(wrong)), tiny, random_prompts((30,))[0])


TRANSFORMERS_NAMES = (
    "jamba",
    "granite-hybrid",
    "nemotron-h-latent",
    "kimi-linear",
    "bailing-hybrid",
    "olmo-hybrid",
    "lfm2-moe",
    "qwen3.5-moe",
)


@pytest.mark.parametrize("name", TRANSFORMERS_NAMES)
def test_names_of_transformers_are_read_too(engine: Engine, tmp_path: Path, name: str) -> None:
    tiny = make(name, tmp_path / "model")
    tiny.model.save_pretrained(tmp_path / "other", save_original_format=False)
    both = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("model", "other")]
    assert both[0] != both[1]
    check_logprobs(engine(tmp_path / "other"), tiny, random_prompts((20,), seed=3)[0])
