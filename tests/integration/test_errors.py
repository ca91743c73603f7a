"""What a user does wrong: exit code 2 and a text with field, value and remedy."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import gguf
import pytest
from engines import CPU_ATTENTION, Models
from gguf_writer import write_gguf
from hf import Tiny, changed_copy

from jackfield.cli import main

DAMAGED = "the file is damaged or its download is incomplete: fetch it again"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(text_model: Tiny) -> str:
    return str(text_model.folder)


def fails(capsys: Capture, *argv: str, text: str) -> None:
    """Run a command; it must end with code 2, print nothing on stdout, and its error must begin with ``text``."""
    code = main(argv)
    out, err = capsys.readouterr()
    error = err[err.index("error:") :]
    assert (code, out) == (2, "")
    assert error.startswith(text), error


# -- models ------------------------------------------------------------------------------------------------------------


def test_no_model(capsys: Capture) -> None:
    remedy = "name one: a folder, a file, hf:ORG/NAME or pypi:NAME"
    fails(capsys, "explain", text=f"error: no model is set\n  field: model.model = ''\n  remedy: {remedy}\n")


def test_wrong_path(capsys: Capture, tmp_path: Path) -> None:
    path = str(tmp_path / "absent.gguf")
    remedy = "name a file, a folder, pypi:NAME, or hf:ORG/NAME"
    text = f"error: there is no file or folder of this name\n  field: model = '{path}'\n  remedy: {remedy}\n"
    fails(capsys, "generate", path, "Hi", text=text)


def test_near_path_is_suggested(capsys: Capture, text_model: Tiny) -> None:
    path = text_model.folder / "modle.safetensors"
    main(["generate", str(path), "Hi"])
    assert f"did you mean '{text_model.folder / 'model.safetensors'}'?" in capsys.readouterr().err


def test_folder_without_a_model(capsys: Capture, tmp_path: Path) -> None:
    text = f"error: the folder holds no model: neither a config.json nor a .gguf file\n  field: path = '{tmp_path}'\n"
    fails(capsys, "generate", str(tmp_path), "Hi", text=text)


@pytest.fixture
def gguf_file(models: Models, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(models["llama"].model, path, "llama", gguf.GGMLQuantizationType.F32)
    return path


def test_truncated_gguf(capsys: Capture, gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[: len(data) // 2])
    assert main(["generate", str(gguf_file), "Hi"]) == 2
    first, field, remedy = capsys.readouterr().err.splitlines()
    assert first.startswith("error: tiny.gguf: tensor 'blk.")
    assert first.endswith(f"the file at byte {len(data) // 2}")
    assert (field, remedy) == (f"  field: path = '{gguf_file}'", f"  remedy: {DAMAGED}")


def test_gguf_cut_in_its_header(capsys: Capture, gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:100])
    assert main(["generate", str(gguf_file), "Hi"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: tiny.gguf: ")
    assert lines[1:] == [f"  field: path = '{gguf_file}'", f"  remedy: {DAMAGED}"]


def test_no_gguf_at_all(capsys: Capture, gguf_file: Path) -> None:
    gguf_file.write_bytes(b"PK\x03\x04" + bytes(200))
    assert main(["generate", str(gguf_file), "Hi"]) == 2
    assert f"field: path = '{gguf_file}'" in capsys.readouterr().err


def test_corrupt_safetensors_header(capsys: Capture, text_model: Tiny, tmp_path: Path) -> None:
    folder = changed_copy(text_model.folder, tmp_path / "copy")
    file = Path(folder) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:12] = b"{{{{"
    file.write_bytes(data)
    assert main(["generate", folder, "Hi"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: model.safetensors: the header is no valid json: ")
    assert lines[1:] == [f"  field: path = '{file}'", f"  remedy: {DAMAGED}"]


def test_truncated_safetensors(capsys: Capture, text_model: Tiny, tmp_path: Path) -> None:
    folder = changed_copy(text_model.folder, tmp_path / "copy")
    file = Path(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["generate", folder, "Hi"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: model.safetensors: ")
    assert lines[1:] == [f"  field: path = '{file}'", f"  remedy: {DAMAGED}"]


def test_unknown_architecture(capsys: Capture, text_model: Tiny, tmp_path: Path) -> None:
    folder = changed_copy(text_model.folder, tmp_path / "copy", architectures=["LlamaForCausalML"])
    text = (
        "error: no plugin fits models for target (LlamaForCausalML): none serves 'LlamaForCausalML'\n"
        "  field: model = 'LlamaForCausalML'\n  remedy: did you mean 'LlamaForCausalLM'"
    )
    fails(capsys, "generate", folder, "Hi", text=text)


def test_unknown_quantization(capsys: Capture, text_model: Tiny, tmp_path: Path) -> None:
    folder = changed_copy(text_model.folder, tmp_path / "copy", quantization_config={"quant_method": "dust"})
    text = (
        "error: no plugin fits quantization_methods for target, dust: none serves 'dust'\n"
        "  field: quantization = 'dust'\n  remedy: installed plugins serve: "
    )
    fails(capsys, "generate", folder, "Hi", text=text)


def test_unread_key(capsys: Capture, text_model: Tiny, tmp_path: Path) -> None:
    folder = changed_copy(text_model.folder, tmp_path / "copy", logit_scale=2.0)
    text = (
        "error: nothing reads these keys of the configuration: logit_scale = 2.0\n"
        f"  field: {folder} = ['logit_scale']\n  remedy: use a plugin that knows these keys"
    )
    fails(capsys, "generate", folder, "Hi", text=text)


def test_missing_tokenizer(capsys: Capture, models: Models) -> None:
    folder = models["llama"].folder
    text = f"error: the folder holds no tokenizer\n  field: path = '{folder}'\n  remedy: put one of tokenizer.json, "
    fails(capsys, "generate", str(folder), "Hi", text=text)


def test_gguf_without_tokenizer(capsys: Capture, gguf_file: Path) -> None:
    text = f"error: the GGUF file holds no tokenizer\n  field: path = '{gguf_file}'\n  remedy: use a file that was "
    fails(capsys, "generate", str(gguf_file), "Hi", text=text)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_unknown_flag(capsys: Capture, model: str) -> None:
    text = "error: Unknown option: --max-modle-len.\n  remedy: did you mean '--max-model-len'?\n"
    fails(capsys, "generate", model, "Hi", "--max-modle-len", "16", text=text)


def test_unknown_key_of_a_file(capsys: Capture, model: str, tmp_path: Path) -> None:
    file = tmp_path / "jackfield.yaml"
    file.write_text("cache:\n  block_sise: 16\n")
    text = (
        f"error: 'cache' has no setting 'block_sise' (file: {file}:2)\n"
        "  field: cache.block_sise = 16\n  remedy: did you mean 'block_size'?"
    )
    fails(capsys, "generate", model, "Hi", "--config", str(file), text=text)


def test_prompt_longer_than_the_context(capsys: Capture, model: str) -> None:
    text = (
        "error: the prompt has 40 tokens, but the context holds 16 tokens with at least one of output\n"
        "  field: prompt = '40 tokens'\n  remedy: shorten the prompt to 15 tokens or less, or raise max_model_len\n"
    )
    fails(capsys, "generate", model, "x" * 40, "--max-model-len", "16", text=text)


def test_empty_prompt(capsys: Capture, model: str) -> None:
    text = "error: the prompt is empty\n  field: prompt = ''\n  remedy: send at least one token\n"
    fails(capsys, "generate", model, "", text=text)


def test_unknown_backend(capsys: Capture, model: str) -> None:
    text = (
        "error: no such plugin in attention_backends: attention.force names 'torch_spda'\n"
        "  field: attention.force = 'torch_spda'\n  remedy: did you mean 'torch_sdpa'"
    )
    fails(capsys, "generate", model, "Hi", "--attention.force", "torch_spda", text=text)


def test_backend_that_cannot_keep_such_a_cache(capsys: Capture, model: str) -> None:
    argv = ["generate", model, "Hi", "--attention.force", "torch_sdpa", "--cache-dtype", "int3"]
    text = (
        "error: 'torch_sdpa' was forced for attention_backends for target, full, but cannot serve it: "
        "cache_dtype: int3 is no type that keys and values can be stored in here\n"
        "  field: attention.force = 'torch_sdpa'\n"
        "  remedy: use one of: float32, float8_e4m3fn, float8_e5m2, int8, int4; plugins that can serve it: none\n"
    )
    fails(capsys, *argv, text=text)


def test_type_that_no_cache_has(capsys: Capture, model: str) -> None:
    text = (
        "error: no plugin fits attention_backends for target, full; the nearest is "
        f"'{CPU_ATTENTION}' (jackfield {version('jackfield')}): "
        "cache_dtype: int3 is no type that keys and values can be stored in here\n"
        "  field: attention = 'full'\n  remedy: use one of: float32, float8_e4m3fn, float8_e5m2, int8, int4\n"
    )
    fails(capsys, "generate", model, "Hi", "--cache-dtype", "int3", text=text)


def test_several_devices(capsys: Capture, model: str) -> None:
    text = (
        "error: parallel.tensor_parallel_size = 2: there is no executor for it yet (cli: --tensor-parallel-size)\n"
        "  field: parallel.tensor_parallel_size = 2\n  remedy: leave it at 1\n"
    )
    fails(capsys, "generate", model, "Hi", "--tensor-parallel-size", "2", text=text)


def test_longer_than_the_model(capsys: Capture, model: str) -> None:
    text = (
        "error: the model was made for sequences of 512 tokens at most\n  field: model.max_model_len = 100000\n"
        "  remedy: use 512 or less, or set max_position_embeddings in model.hf_overrides\n"
    )
    fails(capsys, "generate", model, "Hi", "--max-model-len", "100000", text=text)


def test_cache_that_holds_nothing(capsys: Capture, model: str) -> None:
    text = (
        "error: the KV cache holds 0 tokens, less than one sequence of max_model_len = 512\n"
        "  field: model.max_model_len = 512\n  remedy: give the cache more memory (cache.kv_cache_memory)\n"
    )
    fails(capsys, "generate", model, "Hi", "--kv-cache-memory", "1KiB", text=text)


def test_model_of_another_format(capsys: Capture, model: str) -> None:
    text = (
        "error: load_format is gguf, but the model is a safetensors checkpoint\n  field: model.load_format = 'gguf'\n"
        "  remedy: leave load_format out, or name a model in that format\n"
    )
    fails(capsys, "generate", model, "Hi", "--load-format", "gguf", text=text)
