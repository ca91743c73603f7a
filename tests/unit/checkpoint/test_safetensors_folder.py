from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import safetensors_bytes, tensor, write_folder
from safetensors.torch import save_file

from jackfield.checkpoint import open_tensors, read_facts
from jackfield.errors import CheckpointError, ModelNotFoundError

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": 8}


def test_a_folder_of_the_official_writer_is_read_back(tmp_path: Path) -> None:
    write_folder(tmp_path, {"config.json": CONFIG})
    tensors = {
        "a": torch.randn(2, 3),
        "b": torch.randn(4, 2).bfloat16(),
        "c": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "d": torch.arange(5),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    facts = read_facts(tmp_path)
    assert (facts.container, facts.architecture, facts.dtype) == ("safetensors", "LlamaForCausalLM", "bfloat16")
    assert (facts.quantization, facts.quantization_config, facts.config) == ("", {}, CONFIG)
    assert {name: (fact.dtype, fact.shape) for name, fact in facts.tensors.items()} == {
        name: (str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in tensors.items()
    }
    source = open_tensors(facts)
    assert source.nbytes == sum(value.nbytes for value in tensors.values())
    np.testing.assert_array_equal(source.get("a"), tensors["a"].numpy())
    np.testing.assert_array_equal(source.get("b"), tensors["b"].view(torch.uint16).numpy())
    np.testing.assert_array_equal(source.get("c"), tensors["c"].view(torch.uint8).numpy())
    np.testing.assert_array_equal(source.get("d"), tensors["d"].numpy())


def test_4_bit_floats_are_two_to_a_byte(tmp_path: Path) -> None:
    content = safetensors_bytes({"a": tensor("F4", [2, 4], 0, 4)}, b"\1\2\3\4")
    facts = read_facts(write_folder(tmp_path, {"config.json": CONFIG, "model.safetensors": content}))
    assert (facts.tensors["a"].dtype, facts.tensors["a"].shape) == ("float4_e2m1fn_x2", (2, 4))
    assert open_tensors(facts).get("a").tolist() == [[1, 2], [3, 4]]


ONE = {"a": tensor("F32", [2], 0, 8)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file ends too early: the header length needs 8 bytes"),
        (safetensors_bytes(ONE, length=1 << 50), f"a header of {1 << 50} bytes is over the limit"),
        (safetensors_bytes(ONE, length=5000), "the file ends too early: the header needs 5000 bytes"),
        (safetensors_bytes("{"), "the header is no valid json"),
        (safetensors_bytes("[" * 100_000), "the header is no valid json"),
        (safetensors_bytes("[]"), "the header is no json object"),
        (safetensors_bytes('{"a": {}, "b": {}, "a": {}}'), "these names occur twice: a"),
        (safetensors_bytes({"a": 1}), "the entry of tensor 'a' is no json object"),
        (safetensors_bytes({"a": tensor("F33", [2], 0, 8)}, b"\0" * 8), "tensor 'a' has the unknown dtype 'F33'"),
        (safetensors_bytes({"a": tensor("F32", [-2], 0, 8)}, b"\0" * 8), "impossible shape or offsets [-2]"),
        (safetensors_bytes({"a": tensor("F32", [2], 0, 4)}, b"\0" * 8), "needs 8 bytes, but its offsets are [0, 4]"),
        (safetensors_bytes(ONE, b"\0" * 7), "tensor 'a' ends at byte"),
        (
            safetensors_bytes({**ONE, "b": tensor("F32", [2], 4, 12)}, b"\0" * 12),
            "tensors 'a' and 'b' overlap",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    write_folder(tmp_path, {"config.json": CONFIG, "model.safetensors": content})
    with pytest.raises(CheckpointError) as caught:
        read_facts(tmp_path)
    assert message in caught.value.message
    assert (caught.value.field, caught.value.value) == ("path", str(tmp_path / "model.safetensors"))
    assert caught.value.remedy


def part(name: str) -> bytes:
    return safetensors_bytes({name: tensor("F32", [2], 0, 8)}, name.encode() * 8)


def test_an_index_says_which_file_holds_a_tensor(tmp_path: Path) -> None:
    both = safetensors_bytes({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 8, 16)}, b"\0" * 16)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    write_folder(tmp_path, {"config.json": CONFIG, "model.safetensors.index.json": index})
    facts = read_facts(write_folder(tmp_path, {"one.safetensors": both, "two.safetensors": part("b")}))
    assert {name: Path(fact.file).name for name, fact in facts.tensors.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }
    assert open_tensors(facts).get("b").tobytes() == b"b" * 8


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b", "c:x"])
def test_an_index_cannot_point_outside(tmp_path: Path, file: str) -> None:
    index = {"weight_map": {"a": file}}
    write_folder(tmp_path, {"config.json": CONFIG, "model.safetensors.index.json": index})
    with pytest.raises(CheckpointError) as caught:
        read_facts(tmp_path)
    assert caught.value.message == (
        f"model.safetensors.index.json names files that are not plain names in its folder: {file}"
    )


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_an_index_without_a_map(tmp_path: Path, weight_map: object) -> None:
    index = {"weight_map": weight_map}
    write_folder(tmp_path, {"config.json": CONFIG, "model.safetensors.index.json": index})
    with pytest.raises(CheckpointError, match="has no weight_map of tensor names to file names"):
        read_facts(tmp_path)


def test_files_and_tensors_that_an_index_promises(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    write_folder(tmp_path, {"config.json": CONFIG, "model.safetensors.index.json": index, "one.safetensors": part("a")})
    with pytest.raises(ModelNotFoundError, match=r"1 of 2 checkpoint files are absent: two\.safetensors"):
        read_facts(tmp_path)
    write_folder(tmp_path, {"two.safetensors": part("c")})
    with pytest.raises(CheckpointError, match=r"two\.safetensors lacks 1 tensors .* the first is 'b'"):
        read_facts(tmp_path)


def test_numbered_files_without_an_index(tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    write_folder(tmp_path, {"config.json": CONFIG, names[0]: part("a"), "consolidated.safetensors": part("z")})
    with pytest.raises(ModelNotFoundError, match=f"1 of 2 checkpoint files are absent: {names[1]}"):
        read_facts(tmp_path)
    write_folder(tmp_path, {names[1]: part("b")})
    assert sorted(read_facts(tmp_path).tensors) == ["a", "b"]
    write_folder(tmp_path, {names[1]: part("a")})
    with pytest.raises(CheckpointError, match="1 tensors lie in more than one file, the first is 'a'"):
        read_facts(tmp_path)


def test_a_config_alone_is_a_container(tmp_path: Path) -> None:
    facts = read_facts(write_folder(tmp_path, {"config.json": CONFIG}))
    assert (facts.container, facts.architecture, facts.tensors) == ("config", "LlamaForCausalLM", {})


def test_paths_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        read_facts(tmp_path / "none")
    assert caught.value.message == "there is no file or folder of this name"
    with pytest.raises(ModelNotFoundError) as caught:
        read_facts(tmp_path)
    assert caught.value.message == "the folder holds no model: neither a config.json nor a .gguf file"
    write_folder(tmp_path, {"config.json": CONFIG})
    with pytest.raises(CheckpointError, match=r"config\.json is one file of a checkpoint folder"):
        read_facts(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json is no valid json"),
        (b"[1]", "config.json holds no json object"),
        (b"\xff\xfe{", "config.json is no valid json"),
        (b"{}", "config.json names no architecture"),
        (b'{"architectures": []}', "config.json names no architecture"),
        (b'{"architectures": ["A"], "quantization_config": {"bits": 4}}', "does not name its quant_method"),
    ],
)
def test_wrong_configs(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_facts(write_folder(tmp_path, {"config.json": content}))
    assert message in caught.value.message


def test_quantization_is_named(tmp_path: Path) -> None:
    section = {"quant_method": "AWQ", "bits": 4}
    facts = read_facts(write_folder(tmp_path, {"config.json": {**CONFIG, "quantization_config": section}}))
    assert (facts.quantization, facts.quantization_config) == ("awq", section)
    legacy = {**CONFIG, "quantization_config": {"load_in_4bit": True}}
    assert read_facts(write_folder(tmp_path, {"config.json": legacy})).quantization == "bitsandbytes"
    facts = read_facts(write_folder(tmp_path, {"config.json": CONFIG, "quantize_config.json": {"bits": 4}}))
    assert (facts.quantization, facts.quantization_config) == ("gptq", {"quant_method": "gptq", "bits": 4})


def test_nested_dtype(tmp_path: Path) -> None:
    config = {"architectures": ["A"], "text_config": {"torch_dtype": "torch.float16"}}
    assert read_facts(write_folder(tmp_path, {"config.json": config})).dtype == "float16"
