"""Files that a stranger made to do harm: typed errors, nothing read from elsewhere, bounded memory."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import ARRAY, STRING, gguf_bytes, safetensors_bytes, tensor, text, write_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jackfield.checkpoint import generation_defaults, read_facts, read_gguf
from jackfield.errors import CheckpointError, JackfieldError, ModelNotFoundError

CONFIG = {"architectures": ["X"], "model_type": "x"}
HEADER = {"a": tensor("F32", [2, 2], 0, 16), "b": tensor("BF16", [4], 16, 24)}
GOOD = safetensors_bytes(HEADER, b"\0" * 24)
FILES: dict[str, bytes] = {
    "config.json": json.dumps({**CONFIG, "text_config": {"eos_token_id": [1, 2]}, "dtype": "bfloat16"}).encode(),
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}).encode(),
    "x.safetensors": GOOD,
    "generation_config.json": json.dumps({"temperature": 0.5, "eos_token_id": 7, "top_k": 3}).encode(),
}


def read(folder: Path) -> None:
    generation_defaults(read_facts(folder))


def test_the_files_are_good(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FILES)
    assert sorted(read_facts(folder).tensors) == ["a", "b"]
    assert generation_defaults(read_facts(folder)).sampling == {"temperature": 0.5, "top_k": 3}


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_found(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, FILES)
    for length in range(len(FILES[name])):
        (folder / name).write_bytes(FILES[name][:length])
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        assert caught.value.field == "path" and name in str(caught.value.value) and caught.value.remedy


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_never_raise_anything_else(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = bytearray(FILES[name])
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    folder = write_folder(tmp_path, {**FILES, name: bytes(content)})
    try:
        read(folder)
    except JackfieldError as error:
        assert isinstance(error, CheckpointError | ModelNotFoundError)
        assert error.field is not None and error.remedy


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        (b"[" + b"[]," * 600_000 + b"[]]", "more than any real file has"),
        (b'{"a": NaN}', "NaN is no json number"),
        (b'{"a": 1, "a": 2}', "these names occur twice: a"),
        (b"[1]", "holds no json object"),
        (b"\xff\xfe{}", "is no valid json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is no valid json"),
    ],
)
def test_hostile_json(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = write_folder(tmp_path, {**FILES, name: content})
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert message in caught.value.message and name in caught.value.message


def test_infinity_is_a_number_of_configurations_and_of_nothing_else(tmp_path: Path) -> None:
    raw = json.dumps({**CONFIG, "time_step_limit": [0.0, float("inf")]}).encode()
    folder = write_folder(tmp_path, {**FILES, "config.json": raw})
    assert read_facts(folder).config["time_step_limit"] == [0.0, float("inf")]
    (folder / "x.safetensors").write_bytes(safetensors_bytes('{"a": Infinity}'))
    with pytest.raises(CheckpointError, match="Infinity is no json number"):
        read_facts(folder)


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/passwd", "..", ".", "", "a/x.safetensors", "C:x", "x\\y", "x\0y", "x" * 300, "\ud800"],
)
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, file: str) -> None:
    index = {"weight_map": {"a": "x.safetensors", "b": file}}
    folder = write_folder(tmp_path / "model", {**FILES, "model.safetensors.index.json": index})
    (tmp_path / "x.safetensors").write_bytes(GOOD)
    with pytest.raises(CheckpointError, match="names files that are not plain names in its folder"):
        read_facts(folder)


def test_links_of_an_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", FILES)
    (tmp_path / "secret.safetensors").write_bytes(GOOD)
    (folder / "x.safetensors").unlink()
    (folder / "x.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_facts(folder)
    assert caught.value.message == (
        "model.safetensors.index.json names links that lead out of its folder: x.safetensors"
    )


def test_a_cache_of_links_is_read(tmp_path: Path) -> None:
    """The hub's cache has all files in one folder and links to them in another."""
    blobs = write_folder(tmp_path / "blobs", {str(number): raw for number, raw in enumerate(FILES.values())})
    folder = tmp_path / "snapshots" / "1"
    folder.mkdir(parents=True)
    for number, name in enumerate(FILES):
        (folder / name).symlink_to(blobs / str(number))
    assert sorted(read_facts(folder).tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": tensor("F32", [1 << 40, 1 << 40], 0, 8)}, "needs"),
        ({"a": tensor("F32", [1 << 63], 0, 8)}, "impossible shape"),
        ({"a": tensor("F32", [1] * 65, 0, 4)}, "impossible shape"),
        ({"a": tensor("F32", [2], 8, 0)}, "needs 8 bytes"),
        ({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, "tensors 'a' and 'b' overlap"),
        ({"a": tensor("F32", [20], 0, 80)}, "ends at byte"),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, "impossible shape"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "impossible shape"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"a": None}, "is no json object"),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: dict[str, Any], message: str) -> None:
    folder = write_folder(tmp_path, {"config.json": CONFIG, "model.safetensors": safetensors_bytes(header, b"\0" * 24)})
    with pytest.raises(CheckpointError) as caught:
        read_facts(folder)
    assert message in caught.value.message and "model.safetensors" in caught.value.message


def _folder_with(name: str, content: bytes) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        read_facts(write_folder(folder, {"config.json": CONFIG, name: content}))

    return run


def _gguf_with(content: bytes) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        (folder / "m.gguf").write_bytes(content)
        read_gguf(folder / "m.gguf")

    return run


def _numbers(count: int) -> bytes:
    return text("k") + ARRAY.to_bytes(4, "little") + bytes(4) + count.to_bytes(8, "little") + bytes(count)


def _pickle_of(table: bytes) -> Callable[[Path], None]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        made.writestr("archive/data.pkl", table)
    return _folder_with("pytorch_model.bin", buffer.getvalue())


BOMBS = {
    "a pickle of many lists": _pickle_of(b"\x80\x02" + b"]" * 3_000_000 + b"."),
    "a pickle that claims a long text": _pickle_of(b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"."),
    "a pickle with a place far away": _pickle_of(b"\x80\x02]r\xff\xff\xff\xff."),
    "a header of the largest length": _folder_with("model.safetensors", safetensors_bytes("{}", length=(1 << 63) - 1)),
    "a header of empty lists": _folder_with(
        "model.safetensors", safetensors_bytes('{"a":[' + "[]," * 4_000_000 + "[]]}")
    ),
    "a header of short names": _folder_with("model.safetensors", safetensors_bytes("[" + '"ab",' * 3_000_000 + "1]")),
    "an index of lists": _folder_with(
        "model.safetensors.index.json", b'{"weight_map": [' + b"[]," * 4_000_000 + b"[]]}"
    ),
    "more tensors than the file has room for": _gguf_with(gguf_bytes(counts=(1 << 60, 1))),
    "an array longer than the file": _gguf_with(
        gguf_bytes([text("k") + b"".join(n.to_bytes(s, "little") for n, s in ((ARRAY, 4), (STRING, 4), (1 << 60, 8)))])
    ),
    "many long arrays": _gguf_with(gguf_bytes([text(f"{n}") + _numbers(1 << 21)[9:] for n in range(4)], counts=(0, 4))),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_take_little_memory(tmp_path: Path, bomb: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            BOMBS[bomb](tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20
