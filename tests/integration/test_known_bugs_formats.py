"""Reports about other engines, as tests of this one: tokenizers and tensors of GGUF files, scales of caches.

A test is named after its report in a public tracker, which the docstring cites; each shows what is right. Those about
single matrices are in tests/unit/quantization/test_known_bugs_checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engines import Engine, Models
from gguf_writer import head_size, write_gguf
from hf import assert_equal, random_prompts
from quantized_models import save
from safetensors.torch import load_file
from test_scaled_caches import NAMES, PROMPT, with_scales
from text_model import byte_characters

from jackfield import LLM, SamplingParams
from jackfield.errors import CheckpointError

F32 = gguf.GGMLQuantizationType.F32
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
START, END, EOT, PAD = 256, 257, 258, 259
"""Ids of the tokens behind those of bytes."""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
)


def byte_level(writer: gguf.GGUFWriter) -> None:
    """Add a tokenizer whose first 256 tokens are bytes."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_characters(), "<|im_start|>", "<|end|>", "<|im_end|>", "<|pad|>"])
    writer.add_token_types([NORMAL] * 256 + [CONTROL] * 4)
    writer.add_token_merges([])
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    """Add a tokenizer of three special tokens, bytes, and a piece for the space; ids of bytes are 3 higher."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"])
    writer.add_token_scores([0.0] * 260)
    writer.add_token_types([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, NORMAL])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def started(
    engine: Engine, models: Models, path: Path, *more: Callable[[gguf.GGUFWriter], None], **settings: Any
) -> LLM:
    """Start an engine on a tiny model with a tokenizer."""

    def add(writer: gguf.GGUFWriter) -> None:
        for one in more:
            one(writer)

    write_gguf(models["llama"].model, path, "llama", F32, more=add)
    return engine(path, **{"skip_tokenizer_init": False, **settings})


@pytest.mark.parametrize(
    ("tokenizer", "flag", "expected"),
    [
        (byte_level, None, [97, 98]),
        (byte_level, False, [97, 98]),
        (byte_level, True, [START, 97, 98]),
        (sentencepiece, None, [1, 259, 100, 101]),
        (sentencepiece, True, [1, 259, 100, 101]),
        (sentencepiece, False, [259, 100, 101]),
    ],
)
def test_q203_the_flag_for_the_first_token_is_obeyed(
    engine: Engine, models: Models, tmp_path: Path, tokenizer: Any, flag: bool | None, expected: list[int]
) -> None:
    """ggml-org/llama.cpp#3966, #4040: BOS was added whatever the file said."""

    def say(writer: gguf.GGUFWriter) -> None:
        if flag is not None:
            writer.add_add_bos_token(flag)

    llm = started(engine, models, tmp_path / "m.gguf", tokenizer, say)
    (request,) = llm.generate(["ab"], SamplingParams(max_tokens=1))
    assert request.prompt_token_ids == expected


def test_q205_templates_know_special_tokens_and_turns_end(engine: Engine, models: Models, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#5487, #5040: tokens that a template names were empty, and no turn ended a text."""

    def say(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(EOT)
        writer.add_chat_template(TEMPLATE)

    llm = started(engine, models, tmp_path / "m.gguf", byte_level, say)
    wish = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={EOT: 1000.0})
    (request,) = llm.chat([{"role": "user", "content": "ab"}], wish)
    assert request.prompt_token_ids == [START, START, 97, 98, EOT, END]
    (output,) = request.outputs
    assert (output.finish_reason, output.text, output.token_ids) == ("stop", "", [EOT])
    other = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={PAD: 1000.0})
    assert llm.chat([{"role": "user", "content": "ab"}], other)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("source", ["llama", "llama_rope"])
def test_q207_a_tensor_of_rotary_factors_is_used(engine: Engine, models: Models, tmp_path: Path, source: str) -> None:
    """vllm-project/vllm#7268: ``rope_freqs.weight`` was an unknown tensor. Factors of 1 change nothing."""
    tiny = models[source]
    rotary, config = tiny.model.model.rotary_emb, tiny.model.config
    plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, rotary.inv_freq.numel()) * 2 / head_size(config))
    write_gguf(tiny.model, tmp_path / "m.gguf", "llama", F32, plain / rotary.inv_freq.numpy())
    prompts = random_prompts((5, 80))
    wish = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answers = engine(tmp_path / "m.gguf").generate(prompts, wish)
    assert_equal(tiny.model, prompts, [answer.outputs[0].token_ids for answer in answers])


@pytest.mark.parametrize("names", NAMES, ids=[keys for keys, _ in NAMES])
def test_r224_scales_of_the_cache_are_applied_and_never_lost(
    engine: Engine, models: Models, tmp_path: Path, names: tuple[str, str]
) -> None:
    """vllm-project/vllm#54623, #25047: scales under a name that was not known were dropped, and 1 taken instead."""
    for file in models["llama"].folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    packed, plain = with_scales(tmp_path / "made", names, [(0.02, 0.02)] * 3)

    def scores(folder: Path) -> torch.Tensor:
        (request,) = engine(folder, cache_dtype="fp8").generate(
            [PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=-1)
        )
        assert request.prompt_logprobs is not None
        places = [entry for entry in request.prompt_logprobs[1:] if entry]
        return torch.tensor([[entry[token].logprob for token in range(260)] for entry in places])

    assert float((scores(packed) - scores(plain)).abs().max()) > 0.01
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.scale_of_keys"] = torch.tensor(0.02)
    config = packed / "config.json"
    folder = save(tmp_path / "unknown", tensors, {})
    (folder / "config.json").write_text(config.read_text())
    with pytest.raises(CheckpointError, match=r"used by nothing: .*scale_of_keys"):
        engine(folder, cache_dtype="fp8")
