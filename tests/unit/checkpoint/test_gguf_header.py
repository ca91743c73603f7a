from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_files import ARCHITECTURE, ARRAY, F32_KEY, entry, gguf_bytes, key, text
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.checkpoint import open_tensors, read_facts, read_gguf
from jackfield.checkpoint.ggml_types import GGML_TYPES
from jackfield.errors import CheckpointError, JackfieldError, ModelNotFoundError

F32, Q4_0 = 0, 2


def write(tmp_path: Path, content: bytes, name: str = "m.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_type_table_holds_all_of_the_gguf_package() -> None:
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    ours = {number: (kind.name, kind.block, kind.nbytes) for number, kind in GGML_TYPES.items()}
    assert {number: ours[number] for number in theirs if number in ours} == theirs


def test_a_file_of_the_official_writer_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("llama.attention.head_count_kv", list(range(100)))
    writer.add_array("tokenizer.ggml.tokens", [f"t{number}" for number in range(65)])
    writer.add_array("general.languages", ["en", "dé"])
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    packed = np.arange(2 * 2 * 18, dtype=np.uint8).reshape(2, 36)
    writer.add_tensor("output_norm.weight", plain)
    writer.add_tensor("half", plain.astype(np.float16))
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    facts = read_facts(path)
    assert (facts.container, facts.architecture, facts.quantization, facts.dtype) == ("gguf", "gguf:llama", "gguf", "")
    assert facts.config["llama.block_count"] == 2
    assert facts.config["llama.rope.freq_base"] == 0.5
    assert facts.config["tokenizer.ggml.add_bos_token"] is True
    assert facts.config["llama.attention.head_count_kv"] == list(range(100))
    assert facts.config["general.languages"] == ["en", "dé"]
    assert "tokenizer.ggml.tokens" not in facts.config
    assert read_gguf(path).metadata["tokenizer.ggml.tokens"][-1] == "t64"
    assert facts.tensors["blk.0.attn_q.weight"].dtype == "ggml:Q4_0"
    assert facts.tensors["blk.0.attn_q.weight"].shape == (2, 64)
    assert facts.tensors["half"].dtype == "ggml:F16"

    source = open_tensors(facts)
    assert source.nbytes == 24 + 12 + 72
    np.testing.assert_array_equal(source.get("output_norm.weight"), plain)
    np.testing.assert_array_equal(source.get("half"), plain.astype(np.float16))
    np.testing.assert_array_equal(source.get("blk.0.attn_q.weight"), packed)


def test_a_plain_file_says_its_dtype(tmp_path: Path) -> None:
    entries = [entry("a", [2, 2], 30, 0), entry("norm", [2], F32, 32)]
    path = write(tmp_path, gguf_bytes(entries=entries, data=b"\0" * 40))
    assert read_facts(path).dtype == "bfloat16"


def test_an_unknown_tensor_has_a_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes(entries=[entry("output", [2], F32, 0)], data=b"\0" * 8))
    with pytest.raises(CheckpointError, match="no tensor 'outptu'") as caught:
        open_tensors(read_facts(path)).get("outptu")
    assert caught.value.remedy == "did you mean 'output'?"


def test_a_file_cut_after_reading_the_header_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes(entries=[entry("a", [2], F32, 0)], data=b"\0" * 8))
    facts = read_facts(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="shorter than when its header was read"):
        open_tensors(facts).get("a")


SMALL = entry("a", [8], F32, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file ends too early: the magic number needs 4 bytes at 0"),
        (gguf_bytes(magic=b"GGML"), "is no GGUF file: it begins with b'GGML'"),
        (gguf_bytes(version=1), "has GGUF version 1; 2 and 3 are known"),
        (gguf_bytes(version=3 << 24), "is a big-endian GGUF file"),
        (gguf_bytes(counts=(1 << 60, 1)), f"{1 << 60} is no possible number of tensors"),
        (gguf_bytes(counts=(0, 1 << 60)), f"{1 << 60} is no possible number of metadata keys"),
        (gguf_bytes(counts=(0, 2))[:-20], "the file ends too early"),
        (gguf_bytes([struct.pack("<Q", 1 << 62)], data=b"\0" * 64), f"a metadata key needs {1 << 62} bytes"),
        (gguf_bytes([ARCHITECTURE, ARCHITECTURE]), "metadata key 'general.architecture' occurs twice"),
        (gguf_bytes([text("k") + struct.pack("<II", 77, 0)]), "metadata key 'k' has the unknown type 77"),
        (
            gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, F32_KEY, 1 << 40)]),
            f"{1 << 40} is no possible number of elements of 'k'",
        ),
        (gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1)]), "metadata key 'k' holds arrays of arrays"),
        (gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, 99, 1)], data=b"\0" * 32), "unknown element type 99"),
        (gguf_bytes([key("general.alignment", 33)]), "general.alignment is 33, which is no power of two"),
        (gguf_bytes([key("general.alignment", 0)]), "general.alignment is 0, which is no power of two"),
        (gguf_bytes([key("x", 1)]), "does not say its general.architecture"),
        (gguf_bytes(entries=[SMALL], data=b"\0" * 31), "tensor 'a' ends at byte"),
        (gguf_bytes(entries=[SMALL, SMALL], data=b"\0" * 64), "tensor 'a' occurs twice"),
        (
            gguf_bytes(entries=[entry("a", [16], F32, 0), entry("b", [8], F32, 32)], data=b"\0" * 96),
            "tensors 'a' and 'b' overlap",
        ),
        (gguf_bytes(entries=[entry("a", [8], F32, 4)], data=b"\0" * 64), "tensor 'a' is not aligned to 32 bytes"),
        (gguf_bytes(entries=[entry("a", [1] * 5, F32, 0)], data=b"\0" * 64), "tensor 'a' has 5 dimensions"),
        (gguf_bytes(entries=[entry("a", [8], 99, 0)], data=b"\0" * 64), "tensor 'a' has the unknown GGML type 99"),
        (gguf_bytes(entries=[entry("a", [33], Q4_0, 0)], data=b"\0" * 64), "no multiple of the 32 of a Q4_0 block"),
        (gguf_bytes(entries=[entry("a", [1 << 40, 1 << 40], F32, 0)]), "tensor 'a' ends at byte"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(CheckpointError) as caught:
        read_facts(path)
    assert message in caught.value.message
    assert (caught.value.field, caught.value.value) == ("path", str(path))
    assert caught.value.remedy


def good_file() -> bytes:
    keys = [ARCHITECTURE, key("tokens", ["a", "b"]), key("flag", True)]
    return gguf_bytes(keys, [SMALL, entry("b", [32, 2], Q4_0, 32)], b"\0" * 68)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    content = good_file()
    assert read_facts(write(tmp_path, content)).tensors.keys() == {"a", "b"}
    for length in range(len(content)):
        with pytest.raises(CheckpointError):
            read_facts(write(tmp_path, content[:length]))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(good_file()) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_never_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(good_file())
    for position, value in changes:
        content[position] = value
    path = write(tmp_path_factory.getbasetemp(), bytes(content))
    try:
        facts = read_facts(path)
    except JackfieldError:
        return
    assert all(fact.offset + fact.nbytes <= len(content) for fact in facts.tensors.values())


def shard(number: int, total: int) -> str:
    return f"m-{number:05d}-of-{total:05d}.gguf"


def test_shards_are_read_as_one_model(tmp_path: Path) -> None:
    first = gguf_bytes([ARCHITECTURE, key("split.tensors.count", 2)], [SMALL], b"\0" * 32)
    second = gguf_bytes([key("split.no", 1)], [entry("b", [8], F32, 0)], b"\1" * 32)
    write(tmp_path, first, shard(1, 2))
    write(tmp_path, second, shard(2, 2))
    for path in (tmp_path, tmp_path / shard(1, 2), tmp_path / shard(2, 2)):
        facts = read_facts(path)
        assert facts.architecture == "gguf:llama"
        assert {name: Path(fact.file).name for name, fact in facts.tensors.items()} == {
            "a": shard(1, 2),
            "b": shard(2, 2),
        }
        assert open_tensors(facts).get("b").tobytes() == b"\1" * 32


def test_wrong_sets_of_shards(tmp_path: Path) -> None:
    content = gguf_bytes([ARCHITECTURE, key("split.tensors.count", 3)], [SMALL], b"\0" * 32)
    write(tmp_path, content, shard(1, 3))
    with pytest.raises(ModelNotFoundError) as caught:
        read_facts(tmp_path)
    assert caught.value.message == f"2 of 3 checkpoint files are absent: {shard(2, 3)}, {shard(3, 3)}"
    write(tmp_path, content, shard(2, 3))
    write(tmp_path, content, shard(3, 3))
    with pytest.raises(CheckpointError, match="2 tensors lie in more than one file, the first is 'a'"):
        read_facts(tmp_path)
    write(tmp_path, gguf_bytes([key("x", 1)]), shard(2, 3))
    write(tmp_path, gguf_bytes([key("x", 1)]), shard(3, 3))
    with pytest.raises(CheckpointError, match="the shards hold 1 tensors, but the first one promises 3"):
        read_facts(tmp_path)
    write(tmp_path, content, "m-00004-of-00003.gguf")
    with pytest.raises(CheckpointError, match="there is no shard 4 of 3"):
        read_facts(tmp_path / "m-00004-of-00003.gguf")


def test_a_folder_with_two_models_is_ambiguous(tmp_path: Path) -> None:
    write(tmp_path, good_file(), "a.gguf")
    write(tmp_path, good_file(), "b.gguf")
    with pytest.raises(CheckpointError) as caught:
        read_facts(tmp_path)
    assert caught.value.message == "the folder holds 2 GGUF models: a.gguf, b.gguf"
    assert caught.value.remedy == "name one of the files"
