"""GGUF files give the tokens of the HF model that they were written from, or that is filled with what they hold."""

from __future__ import annotations

import copy
from pathlib import Path

import gguf
import numpy as np
import pytest
from engines import Engine, Models
from gguf_writer import fill_from_gguf, head_size, rows_in_halves, rows_in_pairs, write_gguf
from hf import assert_equal, assert_logprobs, make_tiny, random_prompts

from jackfield import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
KINDS = {"f32": gguf.GGMLQuantizationType.F32, "q8_0": gguf.GGMLQuantizationType.Q8_0}
SOURCES = {
    "llama": ("llama", "llama"),
    "llama_tied": ("llama", "llama"),
    "qwen2_full": ("qwen2", "qwen2"),
    "qwen3": ("qwen3", "qwen3"),
}
"""The tiny model, and the architecture's name in GGUF."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_gguf_equals_the_reference(engine: Engine, models: Models, tmp_path: Path, source: str, kind: str) -> None:
    arch, family = SOURCES[source]
    tiny = make_tiny(tmp_path / "hf", family) if source == "qwen2_full" else models[source]
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny.model, path, arch, KINDS[kind])
    reference = copy.deepcopy(tiny.model)
    fill_from_gguf(reference, path, arch)
    prompts = random_prompts((1, 5, 33, 80))
    llm = engine(path)
    assert_equal(reference, prompts, [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)])
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=4)
    assert_logprobs(reference, prompts[2], llm.generate(prompts[2], params)[0].outputs[0], count=4)


@pytest.mark.parametrize("source", ["llama", "llama_rope"])
def test_factors_of_rotary_frequencies(engine: Engine, models: Models, tmp_path: Path, source: str) -> None:
    """Converters of Llama 3.1 write its scaling as a tensor ``rope_freqs.weight``; some write one of ones."""
    tiny = models[source]
    rotary, config = tiny.model.model.rotary_emb, tiny.model.config
    plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, rotary.inv_freq.numel()) * 2 / head_size(config))
    factors = plain / rotary.inv_freq.numpy()
    assert np.allclose(factors, 1) == (source == "llama")
    write_gguf(tiny.model, tmp_path / "tiny.gguf", "llama", KINDS["f32"], factors)
    prompts = random_prompts((1, 5, 33, 80))
    llm = engine(tmp_path / "tiny.gguf")
    assert_equal(tiny.model, prompts, [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)])
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=4)
    assert_logprobs(tiny.model, prompts[3], llm.generate(prompts[3], params)[0].outputs[0], count=4)


def test_a_plain_file_holds_the_very_model_it_was_written_from(models: Models, tmp_path: Path) -> None:
    tiny = models["llama"]
    write_gguf(tiny.model, tmp_path / "tiny.gguf", "llama", KINDS["f32"])
    read = copy.deepcopy(tiny.model)
    fill_from_gguf(read, tmp_path / "tiny.gguf", "llama")
    for (name, mine), (_, theirs) in zip(read.named_parameters(), tiny.model.named_parameters(), strict=True):
        assert mine.equal(theirs), name


def test_row_order_is_that_of_the_format(models: Models) -> None:
    config = models["llama"].model.config
    rows = np.arange(64, dtype=np.float32).reshape(64, 1)
    pairs = rows_in_pairs("x.q_proj.weight", rows, config, "llama").flatten().tolist()
    assert pairs[:6] == [0, 8, 1, 9, 2, 10]
    assert pairs[16:20] == [16, 24, 17, 25]
    assert rows_in_halves("x.q_proj.weight", np.array(pairs).reshape(64, 1), config, "llama").tolist() == rows.tolist()
