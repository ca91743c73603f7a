"""What whole quantized checkpoints have besides matrices: heads, scales of caches, side files, words of other tools."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from hf import random_prompts
from quantized_models import projections, quantized, same, save, tiny
from quantized_writers import FORMATS, fp8, gptq
from safetensors.torch import load_file
from tiny_models import RECIPES

from jackfield import LLM, SamplingParams
from jackfield.engine.save_state import save_sharded_state
from jackfield.errors import JackfieldError


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama") / "source", vocab_size=256)


def changed(folder: Path, name: str, config: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Path:
    """Return a copy of a model folder with more tensors, or another quantization_config."""
    values = json.loads((folder / "config.json").read_text())
    if config is not None:
        values["quantization_config"] = config
    own = {key.replace("__", "."): value for key, value in tensors.items()}
    return save(folder.parent / name, {**load_file(folder / "model.safetensors"), **own}, values)


def test_heads_and_embeddings_of_few_bits(engine: Engine, source: Path, tmp_path: Path) -> None:
    def which(module: str) -> bool:
        return projections(module) or module == "lm_head"

    config = {**FORMATS["gptq-4"].config, "lm_head": True}
    packed, plain = quantized(source, tmp_path, gptq(4, 32), config, which)
    assert "lm_head.qweight" in load_file(packed / "model.safetensors")
    same(engine(packed, max_model_len=128), engine(plain, max_model_len=128))
    everything = {"quant_method": "fp8", "ignored_layers": ["nothing"]}
    packed, plain = quantized(source, tmp_path / "fp8", fp8("channel"), everything, lambda m: "norm" not in m)
    assert load_file(packed / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.float8_e4m3fn
    same(engine(packed, max_model_len=128), engine(plain, max_model_len=128))


@pytest.mark.parametrize("name", ["ao-int8", "ao-int4-pairs", "gptq-4", "ct-w4-asymmetric"])
def test_an_embedding_of_few_bits_that_is_the_head_too(engine: Engine, tmp_path: Path, name: str) -> None:
    tied = tiny(tmp_path / "tied", vocab_size=256, tie_word_embeddings=True)
    kind = FORMATS[name]
    config = dict(kind.config)
    if "config_groups" in config:
        (group,) = config["config_groups"].values()
        config["config_groups"] = {"embeddings": {**group, "targets": ["Embedding"]}}
    packed, plain = quantized(tied, tmp_path, kind.write, config, lambda module: module.endswith("embed_tokens"))
    assert "lm_head.weight" not in load_file(packed / "model.safetensors")
    same(engine(packed, max_model_len=128), engine(plain, max_model_len=128))


def test_a_tensor_of_a_quantized_layer_that_nothing_takes_is_named(
    engine: Engine, source: Path, tmp_path: Path
) -> None:
    kind = FORMATS["ct-w4-group"]
    packed, _ = quantized(source, tmp_path, kind.write, kind.config)
    folder = changed(packed, "more", model__layers__1__mlp__up_proj__weight_bonus=torch.ones(1))
    with pytest.raises(JackfieldError, match=r"1 checkpoint tensors are used by nothing: .*up_proj\.weight_bonus"):
        engine(folder)


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}, "gptq-4"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, "awq"),
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}, "modelopt-fp8"),
    ],
)
def test_files_from_before_config_json_said_so(
    engine: Engine, source: Path, tmp_path: Path, file: str, content: dict[str, Any], name: str
) -> None:
    packed, plain = quantized(source, tmp_path, FORMATS[name].write, {})
    values = json.loads((packed / "config.json").read_text())
    del values["quantization_config"]
    (packed / "config.json").write_text(json.dumps(values))
    (packed / file).write_text(json.dumps(content))
    same(engine(packed, max_model_len=128), engine(plain, max_model_len=128))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("gptq_marlin", "gptq-4"),
        ("awq_marlin", "awq"),
        ("compressed_tensors", "ct-fp8-channel"),
        ("FP8", "fp8-channel"),
    ],
)
def test_other_words_for_formats(engine: Engine, source: Path, tmp_path: Path, word: str, name: str) -> None:
    kind = FORMATS[name]
    packed, plain = quantized(source, tmp_path, kind.write, {**kind.config, "quant_method": word})
    same(engine(packed, max_model_len=128), engine(plain, max_model_len=128))


@pytest.mark.parametrize("name", ["gptq-4", "bnb-nf4"])
def test_batches_change_nothing_where_that_is_asked_for(
    engine: Engine, source: Path, tmp_path: Path, name: str
) -> None:
    kind = FORMATS[name]
    packed, _ = quantized(source, tmp_path, kind.write, kind.config)
    llm = engine(packed, max_model_len=128, batch_invariant=True)
    prompts = random_prompts((30, 5, 17), seed=2)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    together = [request.outputs[0].logprobs for request in llm.generate(prompts, greedy)]
    assert [llm.generate([prompt], greedy)[0].outputs[0].logprobs for prompt in prompts] == together


def test_mixed_precision_of_modelopt(engine: Engine, source: Path, tmp_path: Path) -> None:
    """Attention in 8-bit floats, the MLP of the first layer in four bits, the rest plain."""
    folder = tmp_path / "source"
    first, plain = quantized(
        source, folder / "a", FORMATS["modelopt-fp8"].write, {}, lambda m: projections(m) and "self_attn" in m
    )
    tensors = load_file(first / "model.safetensors")
    meaning = load_file(plain / "model.safetensors")
    layers = {f"model.layers.{i}.self_attn": {"quant_algo": "FP8"} for i in range(2)}
    for part in ("gate_proj", "up_proj", "down_proj"):
        module = f"model.layers.0.mlp.{part}"
        found, meaning[f"{module}.weight"] = FORMATS["modelopt-nvfp4"].write(tensors.pop(f"{module}.weight"))
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in found.items()}
        layers[module] = {"quant_algo": "NVFP4"}
    values = json.loads((plain / "config.json").read_text())
    own = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    packed = save(tmp_path / "packed", tensors, {**values, "quantization_config": own})
    same(engine(packed, max_model_len=128), engine(save(tmp_path / "plain", meaning, values), max_model_len=128))


def test_gptq_of_a_model_that_has_inputs_first(engine: Engine, tmp_path: Path) -> None:
    """GPT-2: plain matrices are [inputs, outputs], packed ones are as everywhere; q, k and v are one."""

    def write(weight: torch.Tensor) -> Any:
        found, meaning = gptq(4, -1)(weight.t())
        return found, meaning.t()

    source = RECIPES["gpt2"].make(tmp_path / "source").folder
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}
    packed, plain = quantized(source, tmp_path, write, config, lambda m: m.endswith(("c_attn", "c_proj", "c_fc")))
    same(engine(packed, max_model_len=128), engine(plain, max_model_len=128))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("phi3", ("fp8-channel", "gptq-4", "modelopt-nvfp4", "awq-gemv", "ct-sparse-fp8", "modelopt-int4-awq")),
        ("cohere", ("fp8-channel", "fp8-block", "modelopt-nvfp4", "bnb-int8", "ct-sparse", "quark-mxfp6")),
    ],
)
def test_other_decoders(engine: Engine, tmp_path: Path, name: str, kinds: tuple[str, ...]) -> None:
    """Phi-3 has fused matrices on disk; Cohere's rotary pairs lie next to each other, so that rows are put in order."""
    source = wider(name, tmp_path / "source")
    for kind in kinds:
        form = FORMATS[kind]
        packed, plain = quantized(source, tmp_path / kind, form.write, form.config, lambda m: m.endswith("proj"))
        same(engine(packed, max_model_len=128), engine(plain, max_model_len=128))


@pytest.mark.parametrize("name", ["awq", "gptq-3", "bnb-nf4", "hqq-4", "quark-int4"])
def test_rows_that_cannot_be_told_apart_are_not_put_in_another_order(engine: Engine, tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    packed, _ = quantized(wider("cohere", tmp_path / "source"), tmp_path, form.write, form.config)
    with pytest.raises(JackfieldError, match=r"rows (are packed 8 to a number|cannot be told apart)"):
        engine(packed)


def wider(name: str, folder: Path) -> Path:
    """Save a tiny model whose width suits every format."""
    recipe = RECIPES[name]
    return replace(recipe, values={**recipe.values, "hidden_size": 64}).make(folder).folder


@pytest.mark.parametrize("name", ["gptq-4-order", "fp8-odd-block", "bnb-nf4-nested"])
def test_saved_as_ranks_hold_it(engine: Engine, source: Path, tmp_path: Path, name: str) -> None:
    """Parameters are saved as they are stored, and finished when they are read again."""
    kind = FORMATS[name]
    packed, plain = quantized(source, tmp_path, kind.write, kind.config)
    folder = save_sharded_state(str(packed), tmp_path / "state")
    same(engine(folder, max_model_len=128), engine(plain, max_model_len=128))


def test_wrong_configurations_are_errors_before_anything_is_loaded(source: Path, tmp_path: Path) -> None:
    kind = FORMATS["gptq-4"]
    packed, _ = quantized(source, tmp_path, kind.write, {**kind.config, "bits": 5})
    with pytest.raises(JackfieldError, match=r"quantization_config\.bits is not one of 2, 3, 4, 8"):
        LLM(str(packed), skip_tokenizer_init=True)
    unknown = changed(packed, "unknown", {"quant_method": "cryptic"})
    with pytest.raises(JackfieldError, match="cryptic"):
        LLM(str(unknown), skip_tokenizer_init=True)


def test_explain_needs_no_torch_for_a_quantized_checkpoint(source: Path, tmp_path: Path) -> None:
    kind = FORMATS["ct-w4-group"]
    packed, _ = quantized(source, tmp_path, kind.write, kind.config)
    code = "import sys; from jackfield.cli import main; main(['explain', sys.argv[1]]); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, str(packed)], capture_output=True, text=True, check=True)
    assert "compressed_tensors" in run.stdout and run.stdout.strip().endswith("False")
