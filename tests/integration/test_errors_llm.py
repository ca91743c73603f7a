"""The same errors through LLM: typed, with field and remedy; a wrong request leaves the engine working."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, Models
from hf import Tiny, changed_copy

from jackfield import LLM, SamplingParams
from jackfield.errors import (
    CheckpointError,
    ConfigError,
    JackfieldError,
    ModelNotFoundError,
    NoCandidateError,
    RequestError,
)
from jackfield.interfaces import BlockSizes, Preference
from jackfield_attention.torch_sdpa import TorchSdpaBackend


class BlocksOf64(TorchSdpaBackend):
    """torch_sdpa that takes one block size only."""

    name = "blocks_of_64"

    @classmethod
    def preference(cls, request: Any) -> Preference:
        return Preference(why="a test")

    @classmethod
    def cache_specs(cls, request: Any) -> Any:
        return [replace(spec, block_sizes=BlockSizes(only=(64,))) for spec in super().cache_specs(request)]


def test_forced_backend_with_an_impossible_block_size(engine: Engine, models: Models) -> None:
    folder = models["llama"].folder
    with pytest.raises(NoCandidateError) as caught:
        engine(folder, plugins=[BlocksOf64], attention="blocks_of_64", block_size=16)
    error = caught.value
    assert (error.field, error.value) == ("attention.force", "blocks_of_64")
    assert error.message.endswith("cannot serve it: block_size: no layout for blocks of 16 tokens")
    assert error.remedy.startswith("leave cache.block_size out, or use a size that blocks_of_64 takes; ")
    assert "torch_sdpa" in error.table
    llm = engine(folder, plugins=[BlocksOf64], attention="blocks_of_64")
    assert llm.config.cache.block_size == 64


STARTS: dict[str, tuple[type[JackfieldError], str, Callable[[Path, Path], dict[str, Any]]]] = {
    "wrong path": (ModelNotFoundError, "model", lambda folder, tmp: {"model": tmp / "absent.gguf"}),
    "no model there": (ModelNotFoundError, "path", lambda folder, tmp: {"model": tmp}),
    "architecture": (
        NoCandidateError,
        "model",
        lambda folder, tmp: {"model": changed_copy(folder, tmp / "a", architectures=["Dust"])},
    ),
    "quantization": (
        NoCandidateError,
        "quantization",
        lambda folder, tmp: {"model": changed_copy(folder, tmp / "q", quantization_config={"quant_method": "dust"})},
    ),
    "no tokenizer": (CheckpointError, "path", lambda folder, tmp: {"model": folder, "skip_tokenizer_init": False}),
    "unknown setting": (ConfigError, "max_modle_len", lambda folder, tmp: {"model": folder, "max_modle_len": 16}),
    "unknown backend": (ConfigError, "attention.force", lambda folder, tmp: {"model": folder, "attention": "torch"}),
    "two devices": (
        ConfigError,
        "parallel.tensor_parallel_size",
        lambda folder, tmp: {"model": folder, "tensor_parallel_size": 2},
    ),
    "too long": (ConfigError, "model.max_model_len", lambda folder, tmp: {"model": folder, "max_model_len": 513}),
    "contradiction": (
        ConfigError,
        "scheduler.max_num_batched_tokens",
        lambda folder, tmp: {"model": folder, "max_num_batched_tokens": 4, "max_num_seqs": 8},
    ),
}


@pytest.mark.parametrize("case", STARTS)
def test_typed_error_at_start(engine: Engine, models: Models, tmp_path: Path, case: str) -> None:
    kind, field, settings = STARTS[case]
    with pytest.raises(kind) as caught:
        engine(**settings(models["llama"].folder, tmp_path))
    assert type(caught.value) is kind
    assert caught.value.field == field
    assert caught.value.remedy


PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ("", "prompt"),
    "no ids": ({"prompt_token_ids": []}, "prompt"),
    "too long": ("x" * 600, "prompt"),
    "far too long": ("x" * 600_000, "prompt"),
    "outside the vocabulary": ([[1, 260]], "prompt_token_ids"),
    "negative": ([[-1]], "prompt_token_ids"),
    "unknown key": ({"promt": "x"}, "prompt"),
    "both": ({"prompt": "x", "prompt_token_ids": [1]}, "prompt"),
    "no prompt at all": ([3.5], "prompt"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_bad_prompt_stops_nothing_else(engine: Engine, text_model: Tiny, case: str) -> None:
    llm = engine(text_model.folder, skip_tokenizer_init=False)
    prompt, field = PROMPTS[case]
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, SamplingParams(max_tokens=4))
    assert caught.value.field == field
    assert caught.value.remedy
    assert works(llm)


def test_one_bad_prompt_of_several_starts_none(engine: Engine, text_model: Tiny) -> None:
    llm = engine(text_model.folder, skip_tokenizer_init=False)
    with pytest.raises(RequestError):
        llm.generate(["fine", ""], SamplingParams(max_tokens=4))
    assert not llm._core.has_work()
    assert works(llm)


PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "stop token": ({"stop_token_ids": [260]}, "sampling_params.stop_token_ids"),
    "bias": ({"logit_bias": {999: 1.0}}, "sampling_params.logit_bias"),
    "allowed": ({"allowed_token_ids": [1, 300]}, "sampling_params.allowed_token_ids"),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_bad_parameter_stops_nothing_else(engine: Engine, text_model: Tiny, case: str) -> None:
    llm = engine(text_model.folder, skip_tokenizer_init=False)
    values, field = PARAMETERS[case]
    with pytest.raises(RequestError) as caught:
        llm.generate("Hi", SamplingParams(**values))
    assert caught.value.field == field
    assert caught.value.remedy == "use ids from 0 to 259"
    assert works(llm)


def test_text_without_a_tokenizer(engine: Engine, models: Models) -> None:
    llm = engine(models["llama"].folder)
    with pytest.raises(RequestError) as caught:
        llm.generate("Hi")
    assert caught.value.message == "the engine was started without a tokenizer"
    with pytest.raises(RequestError) as caught:
        llm.generate([[1]], SamplingParams(stop=["x"]))
    assert (caught.value.field, caught.value.value) == ("sampling_params.stop", ["x"])
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=4))[0].outputs[0].token_ids) == 4


def test_too_few_parameters(engine: Engine, text_model: Tiny) -> None:
    llm = engine(text_model.folder, skip_tokenizer_init=False)
    with pytest.raises(RequestError) as caught:
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)
    assert caught.value.message == "there are 2 sampling parameters for 3 prompts"
    assert works(llm)


def works(llm: LLM) -> bool:
    """Return whether the engine still answers."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    return len(llm.generate("fine", params)[0].outputs[0].token_ids) == 5
