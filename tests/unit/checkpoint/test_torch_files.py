from __future__ import annotations

import collections
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import write_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from jackfield.checkpoint import open_tensors, read_facts
from jackfield.checkpoint.torch_file import read_torch
from jackfield.errors import CheckpointError, ModelNotFoundError
from jackfield.loader.weights import to_torch

CONFIG = {"architectures": ["X"], "model_type": "x"}
TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a.bias": torch.arange(3, dtype=torch.bfloat16),
    "b": torch.tensor([True, False]),
    "c": torch.arange(4, dtype=torch.int64)[1:3],
    "f8": torch.ones(4).to(torch.float8_e4m3fn),
    "u16": torch.arange(3).to(torch.uint16),
    "parameter": nn.Parameter(torch.ones(2, 2)),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
}


def saved(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def raw(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of a tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


def archive(table: bytes, records: dict[str, bytes] | None = None, *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a file like torch's with any table."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as made:
        for name, raw in {"data.pkl": table, "byteorder": b"little", **(records or {})}.items():
            made.writestr(f"archive/{name}", raw)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_tensors_are_those_that_torch_wrote(tmp_path: Path, protocol: int, kind: Callable[..., Any]) -> None:
    folder = write_folder(
        tmp_path, {"config.json": CONFIG, "pytorch_model.bin": saved(kind(TENSORS), pickle_protocol=protocol)}
    )
    facts = read_facts(folder)
    assert facts.container == "pytorch"
    source = open_tensors(facts)
    assert list(facts.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        found = to_torch(source.get(name), facts.tensors[name].dtype)
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert raw(found) == raw(tensor)


def test_attributes_of_a_state_dict_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(saved(nn.Linear(2, 3).state_dict()))
    assert {name: facts.shape for name, facts in read_torch(tmp_path / "m.bin").items()} == {
        "weight": (3, 2),
        "bias": (3,),
    }


def test_shared_storages_are_read_twice(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    (tmp_path / "m.bin").write_bytes(saved({"a": weight, "b": weight, "tail": weight[2:]}))
    tensors = read_torch(tmp_path / "m.bin")
    assert tensors["a"].offset == tensors["b"].offset == tensors["tail"].offset - 8


def test_shards_with_an_index(tmp_path: Path) -> None:
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    files = {name: saved({key: torch.ones(2)}) for name, key in zip(names, "ab", strict=True)}
    folder = write_folder(
        tmp_path, {"config.json": CONFIG, "pytorch_model.bin.index.json": index, **files, "training_args.bin": b"x"}
    )
    assert sorted(read_facts(folder).tensors) == ["a", "b"]
    (folder / names[1]).unlink()
    with pytest.raises(ModelNotFoundError, match="1 of 2 checkpoint files are absent: pytorch_model-00002-of-00002"):
        read_facts(folder)


def test_safetensors_are_taken_first_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = write_folder(tmp_path, {"config.json": CONFIG, "pytorch_model.bin": saved({"a": torch.ones(2)})})
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    assert read_facts(folder).container == "safetensors"
    assert read_facts(folder, "pytorch").container == "pytorch"


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    raw = pickle.dumps({"a": Evil(mark)}, protocol=2)
    pickle.loads(raw)
    assert mark.is_dir(), "the pickle does what the test needs"
    mark.rmdir()
    (tmp_path / "m.bin").write_bytes(archive(raw))
    with pytest.raises(CheckpointError) as caught:
        read_torch(tmp_path / "m.bin")
    assert caught.value.message == (
        "m.bin holds more than tensors, or is damaged: it names posix.mkdir, which is no part of a tensor; "
        "nothing was run"
    )
    assert caught.value.value == str(tmp_path / "m.bin")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": 1}, protocol=2), "m.bin is a bare pickle, as torch wrote before version 1.6"),
        (saved({"a": torch.ones(2)}, _use_new_zipfile_serialization=False), "m.bin is a bare pickle"),
        (b"GGUF", "m.bin is no PyTorch file: it begins with b'GGUF'"),
        (b"", "m.bin is no PyTorch file: it begins with b''"),
        (saved([torch.ones(2)]), "m.bin holds list, no dictionary of tensors"),
        (saved({"a": torch.ones(2), "epoch": 3}), "m.bin holds entries that are no named tensors: epoch"),
        (saved({1: torch.ones(2)}), "m.bin holds entries that are no named tensors: 1"),
        (saved({"a": torch.ones(2, 3).t()}), "m.bin: tensor 'a' is stored transposed or with gaps"),
        (
            saved(nn.Linear(2, 2)),
            "m.bin holds more than tensors, or is damaged: it names torch.nn.modules.linear.Linear",
        ),
        (archive(pickle.dumps({}), compression=zipfile.ZIP_DEFLATED), "is compressed, which torch never does"),
        (archive(b"\x80\x02}.", {"byteorder": b"big"}), "m.bin has the byte order b'big'"),
        (archive(b"\x80\x02}"), "pickle exhausted before seeing STOP"),
        (archive(b"\x80\x02."), "it takes a value where there is none"),
        (archive(b"\x80\x02h\x07."), "it asks for value 7, which it did not keep"),
        (archive(b"\x80\x02\x8a\xff" + b"1" * 3), "it is damaged"),
        (archive(b"\x80\x02U\x01aR."), "it holds SHORT_BINSTRING, which no table of tensors needs"),
        (archive(b"\x80\x04\x8d" + b"\xff" * 8), "it is damaged"),
        (archive(b"\x80\x02}r\xff\xff\xff\xff."), None),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: bytes, message: str | None) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(content)
    if message is None:  # a place in the memo costs nothing, however large its number
        assert read_torch(path) == {}
        return
    with pytest.raises(CheckpointError) as caught:
        read_torch(path)
    assert message in caught.value.message
    assert (caught.value.field, caught.value.value) == ("path", str(path)) and caught.value.remedy


def _table(numbers: int, offset: int, shape: tuple[int, ...], key: str = "0") -> bytes:
    """Return a table with one float tensor whose claims may be wrong."""
    storage = ("storage", Global("torch", "FloatStorage"), key, "cpu", numbers)
    strides = tuple(1 for _ in shape)
    buffer = io.BytesIO()
    Writer(buffer, storage, offset, shape, strides).write()
    return buffer.getvalue()


class Global:
    """A class by name, for :class:`Writer`."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Writer:
    """Writes the opcodes of one tensor."""

    def __init__(self, out: io.BytesIO, storage: tuple[Any, ...], *arguments: Any) -> None:
        self.out, self.storage, self.arguments = out, storage, arguments

    def write(self) -> None:
        self.out.write(b"\x80\x02}(")
        self.value("a")
        self.out.write(b"ctorch._utils\n_rebuild_tensor_v2\n((")
        for item in self.storage:
            self.value(item)
        self.out.write(b"tQ")
        for item in (*self.arguments, False, ()):
            self.value(item)
        self.out.write(b"tRu.")

    def value(self, item: Any) -> None:
        if isinstance(item, Global):
            self.out.write(f"c{item.module}\n{item.name}\n".encode())
        elif isinstance(item, tuple):
            self.out.write(b"(")
            for one in item:
                self.value(one)
            self.out.write(b"t")
        else:
            self.out.write(pickle.dumps(item, protocol=2)[2:-1].split(b"q\x00")[0])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (_table(4, 0, (5,)), "m.bin: tensor 'a' reaches past the 16 bytes of its storage"),
        (_table(4, 4, (1,)), "m.bin: tensor 'a' reaches past the 16 bytes of its storage"),
        (_table(5, 0, (4,)), "m.bin: tensor 'a' reaches past the 16 bytes of its storage"),
        (_table(4, 0, (1 << 62,)), "m.bin: tensor 'a' reaches past the 16 bytes of its storage"),
        (_table(4, -1, (2,)), "a tensor has an impossible shape, stride or type"),
        (_table(4, 0, (-2,)), "a tensor has an impossible shape, stride or type"),
        (_table(-4, 0, (2,)), "it names a storage in a way that torch does not"),
        (_table(4, 0, (1,) * 65), "m.bin: tensor 'a' has 65 dimensions"),
        (_table(4, 0, (4,), "../../etc"), "m.bin: the storage '../../etc' of tensor 'a' is absent"),
    ],
)
def test_lying_sizes(tmp_path: Path, table: bytes, message: str) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(archive(_table(4, 0, (4,)), {"data/0": b"\0" * 16}))
    assert read_torch(path)["a"].shape == (4,)
    path.write_bytes(archive(table, {"data/0": b"\0" * 16}))
    with pytest.raises(CheckpointError) as caught:
        read_torch(path)
    assert message in caught.value.message


def test_a_record_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02}.")
        made.writestr("archive/data.pkl", b"\x80\x02}.")
    with pytest.raises(CheckpointError, match=r"holds the record 'archive/data\.pkl' twice"):
        read_torch(path)


def test_one_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(saved({"a": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"m\.pt is one file of a checkpoint folder"):
        read_facts(path)


GOOD = saved({"a": torch.ones(3, 4), "b": nn.Parameter(torch.ones(2))})


@pytest.mark.parametrize("share", range(0, 100, 4))
def test_every_truncation_is_found(tmp_path: Path, share: int) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(GOOD[: len(GOOD) * share // 100])
    with pytest.raises(CheckpointError):
        read_torch(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.lists(st.integers(0, len(GOOD) - 1), min_size=1, max_size=4), values=st.binary(min_size=4, max_size=4))
def test_changed_bytes_never_raise_anything_else(tmp_path: Path, at: list[int], values: bytes) -> None:
    content = bytearray(GOOD)
    for place, value in zip(at, values, strict=False):
        content[place] = value
    path = tmp_path / "m.bin"
    path.write_bytes(content)
    try:
        tensors = read_torch(path)
    except CheckpointError as error:
        assert error.value == str(path) and error.remedy
        return
    for tensor in tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(content)
