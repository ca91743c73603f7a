"""Beam search against HF transformers' ``generate``: sequences, scores, and where they end."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, Models
from hf import Tiny, changed_copy, random_prompts

from jackfield.engine.beam_search import BeamSearchParams
from jackfield.errors import RequestError

PROMPTS = random_prompts((1, 5, 12, 30), seed=4)


def with_ends(tiny: Tiny, target: Path, ends: list[int]) -> str:
    """Return a copy of a model that ends at these ids."""
    folder = changed_copy(tiny.folder, target, eos_token_id=ends)
    (target / "generation_config.json").unlink(missing_ok=True)
    return folder


@cache
def likely_ends(model: Any, count: int) -> list[int]:
    """Return the tokens that the reference's beams say most, so that beams end, and at different lengths."""
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    said = Counter(
        token for prompt in PROMPTS for tokens, _ in reference(model, prompt, params, []) for token in tokens
    )
    return [token for token, _ in said.most_common(count)]


@torch.no_grad()
def reference(
    model: Any, prompt: list[int], params: BeamSearchParams, ends: list[int]
) -> list[tuple[list[int], float]]:
    """Return (new tokens, score) of each sequence, best first."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=False,
        eos_token_id=None if params.ignore_eos else ends or None,
        pad_token_id=259,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [[t for t in row[len(prompt) :].tolist() if t != 259] for row in found.sequences]
    return list(zip(sequences, found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("num_ends", [0, 1, 3])
def test_sequences_and_scores_are_the_references(
    engine: Engine, models: Models, tmp_path: Path, width: int, penalty: float, num_ends: int
) -> None:
    tiny = models["llama"]
    ends = likely_ends(tiny.model, num_ends)
    llm = engine(Path(with_ends(tiny, tmp_path / "model", ends)) if ends else tiny.folder)
    params = BeamSearchParams(beam_width=width, max_tokens=12, length_penalty=penalty)
    reasons = set()
    for prompt, output in zip(PROMPTS, llm.beam_search(prompts(), params), strict=True):
        expected = reference(tiny.model, prompt, params, ends)
        assert [s.tokens[len(prompt) :] for s in output.sequences] == [tokens for tokens, _ in expected]
        assert [s.score for s in output.sequences] == [pytest.approx(score, abs=1e-4) for _, score in expected]
        for sequence in output.sequences:
            reasons.add(sequence.finish_reason)
            length = len(sequence.tokens) - len(prompt)
            assert sequence.finish_reason == ("stop" if sequence.tokens[-1] in ends else "length")
            assert sequence.score == pytest.approx(sequence.cum_logprob / length**penalty)
    # A large penalty favours length so much that only the longest sequences are left.
    assert ("stop" in reasons if penalty <= 1 else "length" in reasons) if ends else reasons == {"length"}


def prompts() -> list[Any]:
    return [{"prompt_token_ids": ids} for ids in PROMPTS]


def test_one_beam_is_greedy(engine: Engine, models: Models) -> None:
    tiny = models["llama"]
    params = BeamSearchParams(beam_width=1, max_tokens=10)
    for prompt, output in zip(PROMPTS, engine(tiny.folder).beam_search(prompts(), params), strict=True):
        with torch.no_grad():
            greedy = tiny.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10, pad_token_id=259)
        assert [sequence.tokens for sequence in output.sequences] == greedy.tolist()


def test_ends_are_tokens_like_others_when_they_are_ignored(engine: Engine, models: Models, tmp_path: Path) -> None:
    tiny = models["llama"]
    ends = likely_ends(tiny.model, 2)
    llm = engine(Path(with_ends(tiny, tmp_path / "model", ends)))
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.beam_search(prompts(), params), strict=True):
        expected = reference(tiny.model, prompt, params, ends)
        assert [s.tokens[len(prompt) :] for s in output.sequences] == [tokens for tokens, _ in expected]
        assert {s.finish_reason for s in output.sequences} == {"length"}


def test_a_single_token_and_a_single_position(engine: Engine, models: Models) -> None:
    tiny = models["llama"]
    llm = engine(tiny.folder, max_model_len=31)
    one = llm.beam_search({"prompt_token_ids": PROMPTS[3]}, BeamSearchParams(beam_width=4, max_tokens=9))[0]
    expected = reference(tiny.model, PROMPTS[3], BeamSearchParams(beam_width=4, max_tokens=1), [])
    assert [s.tokens[30:] for s in one.sequences] == [tokens for tokens, _ in expected], "the context holds one more"


def test_beams_share_a_small_cache(engine: Engine, models: Models) -> None:
    tiny = models["llama"]
    llm = engine(tiny.folder, num_blocks=9, block_size=8, max_model_len=56, max_num_seqs=3)
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    for prompt, output in zip(PROMPTS, llm.beam_search(prompts(), params), strict=True):
        expected = reference(tiny.model, prompt, params, [])
        assert [s.tokens[len(prompt) :] for s in output.sequences] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize(("field", "value"), [("beam_width", 0), ("max_tokens", 0), ("beam_width", True)])
def test_wrong_values_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, field: value})
    error = caught.value
    assert (error.message, error.field) == (f"{field} must be a whole number >= 1", field)
    assert (error.value, error.remedy) == (value, "use 1 or more")
