"""Every dense architecture against HF transformers, or against a model of transformers that computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from hf import TOLERANCE, Tiny, assert_equal, changed_copy, continuation_logits, random_prompts
from tiny_models import LENGTH, LONG, RECIPES, WINDOW, recipe

from jackfield import LLM, SamplingParams

LENGTHS = (1, 7, 16, 3 * WINDOW)
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def check_logprobs(llm: LLM, tiny: Tiny, prompt: list[int]) -> None:
    """Compare the log probabilities of the whole vocabulary at every place of a prompt."""
    (request,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=-1))
    expected = continuation_logits(tiny.model, prompt[:1], prompt[1:]).log_softmax(dim=-1)
    assert request.prompt_logprobs is not None
    for entry, row in zip(request.prompt_logprobs[1:], expected, strict=True):
        assert entry is not None and len(entry) == len(row)
        worst = max(abs(one.logprob - float(row[token])) for token, one in entry.items())
        assert worst <= TOLERANCE


@pytest.mark.parametrize("name", RECIPES)
def test_logits_and_tokens_equal_the_reference(engine: Engine, tmp_path: Path, name: str) -> None:
    tiny = RECIPES[name].make(tmp_path)
    llm = engine(tiny.folder, block_size=8, long_prefill_token_threshold=7, max_num_seqs=8)
    check_logprobs(llm, tiny, random_prompts((WINDOW + 12,), seed=3)[0])
    prompts = random_prompts(LENGTHS)
    batch = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    assert [len(output) for output in batch] == [32] * len(prompts)
    assert_equal(tiny.model, prompts, batch)
    again = llm.generate([[*prompts[-1], 5]], GREEDY)[0]
    assert (again.num_cached_tokens or 0) >= 2 * WINDOW
    assert_equal(tiny.model, [[*prompts[-1], 5]], [again.outputs[0].token_ids])


@pytest.mark.parametrize(("longest", "lengths"), [(64, (5, 30)), (LENGTH, (70, 100))], ids=["short", "long"])
def test_the_longest_length_chooses_the_factors_of_longrope(
    engine: Engine, tmp_path: Path, longest: int, lengths: tuple[int, ...]
) -> None:
    tiny = recipe("Phi3", rope_parameters=LONG, original_max_position_embeddings=64).make(tmp_path)
    llm = engine(tiny.folder, block_size=8, long_prefill_token_threshold=7, max_model_len=longest)
    prompts = random_prompts(lengths)
    # transformers chooses by the length of each sequence: short ones must stay so, long ones must begin so.
    check_logprobs(llm, tiny, prompts[-1])
    assert_equal(tiny.model, prompts, [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)])


class Biased(torch.nn.Module):
    """Llama without rotations and with linear biases, as the larger Baichuan models are, and a head of unit rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        model.model.rotary_emb.forward = self._unturned
        heads = model.config.num_attention_heads
        self.slopes = torch.tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)])

    def _unturned(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.model.config.head_dim
        return x.new_ones(1, x.shape[1], size), x.new_zeros(1, x.shape[1], size)

    def forward(self, input_ids: torch.Tensor) -> Any:
        count = input_ids.shape[1]
        behind = torch.arange(count)[:, None] - torch.arange(count)[None, :]
        mask = (-behind * self.slopes[:, None, None]).masked_fill(behind < 0, float("-inf"))
        return self.model(input_ids=input_ids, attention_mask=mask[None])


@pytest.mark.parametrize("second", [False, True])
def test_the_larger_baichuan_models(engine: Engine, tmp_path: Path, second: bool) -> None:
    tiny = RECIPES["baichuan"].make(tmp_path / "model")
    keys: dict[str, Any] = {
        "architectures": ["BaichuanForCausalLM"],
        "rope_theta": None,
        **({"z_loss_weight": 0} if second else {}),
    }
    folder = Path(changed_copy(tiny.folder, tmp_path / "large", **keys))
    if second:
        weight = tiny.model.lm_head.weight
        weight.data = weight.data / weight.data.norm(dim=-1, keepdim=True)
    reference = Tiny(folder, Biased(tiny.model))
    llm = engine(folder, block_size=8, long_prefill_token_threshold=7, max_num_seqs=8)
    check_logprobs(llm, reference, random_prompts((WINDOW + 12,), seed=3)[0])
    prompts = random_prompts(LENGTHS)
    batch = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    assert_equal(reference.model, prompts, batch)


def test_a_factor_that_is_slightly_off_is_noticed(engine: Engine, tmp_path: Path) -> None:
    """Without this the checks above would hold for nothing."""
    tiny = RECIPES["granite"].make(tmp_path / "model")
    wrong = changed_copy(tiny.folder, tmp_path / "wrong", residual_multiplier=0.501)
    with pytest.raises(AssertionError):
        check_logprobs(engine(Path(wrong)), tiny, random_prompts((30,))[0])
