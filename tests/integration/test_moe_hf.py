"""Every architecture with experts against HF transformers, with checkpoints in both layouts that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import Engine
from hf import Tiny, assert_equal, changed_copy, continuation_logits, random_prompts
from moe_models import MOE_RECIPES
from safetensors.torch import load_file
from test_models_hf import GREEDY, LENGTHS, check_logprobs
from tiny_models import WINDOW

from jackfield import SamplingParams


def biased(tiny: Tiny) -> Tiny:
    """Give biases of the choice random numbers, which transformers starts at 0, and save the model again."""
    found = [t for name, t in tiny.model.state_dict().items() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for tensor in found:
            tensor.normal_(0.0, 0.3)
    if found:
        tiny.model.save_pretrained(tiny.folder)
    return tiny


class Open(torch.nn.Module):
    """A gate that lets everything through."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full_like(hidden[..., :1], 100.0)


@pytest.mark.parametrize("name", MOE_RECIPES)
def test_logits_and_tokens_equal_the_reference(engine: Engine, tmp_path: Path, name: str) -> None:
    tiny = biased(MOE_RECIPES[name].make(tmp_path))
    if name == "deepseek":
        for layer in tiny.model.model.layers:
            layer.mlp.shared_expert_gate = Open()
    llm = engine(tiny.folder, block_size=8, long_prefill_token_threshold=7, max_num_seqs=8)
    check_logprobs(llm, tiny, random_prompts((WINDOW + 12,), seed=3)[0])
    prompts = random_prompts(LENGTHS)
    batch = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    assert [len(output) for output in batch] == [32] * len(prompts)
    assert_equal(tiny.model, prompts, batch)


FUSED = (
    "mixtral",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "glm4_moe",
    "ernie4_5_moe",
    "hunyuan_moe",
)


@pytest.mark.parametrize("name", FUSED)
def test_experts_in_one_tensor_are_read_too(engine: Engine, tmp_path: Path, name: str) -> None:
    tiny = biased(MOE_RECIPES[name].make(tmp_path / "model"))
    tiny.model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    check_logprobs(engine(tmp_path / "fused"), tiny, random_prompts((20,), seed=3)[0])


def test_a_factor_that_is_slightly_off_is_noticed(engine: Engine, tmp_path: Path) -> None:
    """Without this the checks above would hold for nothing."""
    tiny = biased(MOE_RECIPES["glm4_moe"].make(tmp_path / "model"))
    wrong = changed_copy(tiny.folder, tmp_path / "wrong", routed_scaling_factor=1.51)
    with pytest.raises(AssertionError):
        check_logprobs(engine(Path(wrong)), tiny, random_prompts((30,))[0])


def test_experts_are_converted_at_load(engine: Engine, tmp_path: Path) -> None:
    tiny = MOE_RECIPES["qwen3_moe"].make(tmp_path)
    llm = engine(tiny.folder, quantization="fp8")
    (decision,) = (found for found in llm.report.decisions if found.family == "moe_experts")
    assert (decision.name, decision.request["kind"]) == ("torch", "fp8")
    prompt = random_prompts((20,))[0]
    (request,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=-1))
    wanted = continuation_logits(tiny.model, prompt[:1], prompt[1:]).log_softmax(dim=-1)
    assert request.prompt_logprobs is not None
    gaps = [
        abs(one.logprob - float(row[token]))
        for entry, row in zip(request.prompt_logprobs[1:], wanted, strict=True)
        for token, one in (entry or {}).items()
    ]
    assert len(gaps) == 19 * 260
    assert 0.001 < sum(gaps) / len(gaps) < 0.5
