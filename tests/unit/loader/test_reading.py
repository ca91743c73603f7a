from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from jackfield.checkpoint import TensorSource, open_tensors, read_facts
from jackfield.errors import CheckpointError, ConfigError
from jackfield.loader import ReadAhead, open_stream
from jackfield.loader.reading import _read_block
from jackfield.loader.weights import to_torch

CPU = torch.device("cpu")


def shards(path: Path, count: int = 3) -> TensorSource:
    """Write shards with two tensors each, in an order that is not the names'."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        tensors = {f"z{number}": torch.full((4,), float(number)), f"a{number}": torch.full((8,), number + 0.5)}
        weight_map |= dict.fromkeys(tensors, file)
        save_file(tensors, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return open_tensors(read_facts(path))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_tensors_come_file_by_file_and_files_are_let_go(tmp_path: Path, threads: int) -> None:
    source = shards(tmp_path)
    offsets = []
    before = threading.active_count()
    for name in ReadAhead(source, threads):
        value = to_torch(source.get(name), "float32")
        assert set(value.tolist()) == {float(name[1:]) + (0.5 if name[0] == "a" else 0.0)}
        facts = source.facts.tensors[name]
        offsets.append((facts.file, facts.offset))
        assert len(source._maps) == 1
    assert offsets == sorted(offsets) and len(offsets) == 6
    assert not source._maps and threading.active_count() == before


class Asked:
    """A pool of threads that runs nothing and keeps what it was asked for: file, offset and bytes."""

    blocks: list[tuple[str, int, int]]

    def __init__(self, *_: object) -> None:
        Asked.blocks = []

    def submit(self, _: object, file: str, offset: int, count: int, stop: threading.Event) -> None:
        assert not stop.is_set()
        self.blocks.append((Path(file).name[6:11], offset, count))

    def shutdown(self, *, cancel_futures: bool) -> None:
        assert cancel_futures


def test_the_next_file_is_read_while_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.loader.reading.ThreadPoolExecutor", Asked)
    source = shards(tmp_path, 4)
    seen = []
    for name in ReadAhead(source, 1):
        seen.append((Path(source.facts.tensors[name].file).name[6:11], Asked.blocks[-1][0]))
    taken = ["00001", "00002", "00003", "00004"]
    ahead = ["00002", "00003", "00004", "00004"]
    assert seen[::2] == seen[1::2] == list(zip(taken, ahead, strict=True))
    assert [block[0] for block in Asked.blocks] == taken


def test_all_blocks_of_a_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.loader.reading.ThreadPoolExecutor", Asked)
    monkeypatch.setattr("jackfield.loader.reading.BLOCK", 64)
    list(ReadAhead(shards(tmp_path, 1), 1))
    size = next(tmp_path.glob("*.safetensors")).stat().st_size
    assert Asked.blocks == [("00001", start, min(64, size - start)) for start in range(0, size, 64)]


def test_a_block_is_read_to_its_end_and_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(5 << 20))
    monkeypatch.setattr("jackfield.loader.reading._is_cached", lambda *_: False)
    read: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(file: int, buffers: list[bytearray], offset: int) -> int:
        read.append((offset, real(file, buffers, offset)))
        return read[-1][1]

    monkeypatch.setattr("jackfield.loader.reading.os.preadv", preadv)
    _read_block(str(tmp_path / "x"), 1 << 20, 3 << 20, threading.Event())
    assert read == [(number << 20, 1 << 20) for number in (1, 2, 3)]
    _read_block(str(tmp_path / "absent"), 0, 1, threading.Event())  # told where it is used


def test_threads_end_when_loading_fails(tmp_path: Path) -> None:
    before = threading.active_count()
    names = iter(ReadAhead(shards(tmp_path), 2))
    next(names)
    names.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


class FakeStreamer:
    """What Run:ai Model Streamer documents."""

    changed: dict[str, torch.Tensor] = {}

    def __enter__(self) -> FakeStreamer:
        return self

    def __exit__(self, *_: object) -> None:
        self.file = ""

    def stream_file(self, file: str) -> None:
        self.file = file

    def get_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with safe_open(self.file, "pt") as opened:
            for name in reversed(list(opened.keys())):
                yield name, self.changed.get(name, opened.get_tensor(name))


class FakeLoader:
    """What fastsafetensors documents."""

    open = 0

    def __init__(self, group: object, device: torch.device, *, nogds: bool) -> None:
        assert (group, device, nogds) == ("single", CPU, True)
        FakeLoader.open += 1

    def add_filenames(self, files: dict[int, list[str]]) -> None:
        self.files = files[0]

    def copy_files_to_device(self) -> FakeLoader:
        FakeLoader.open += 1
        return self

    def get_tensor(self, name: str) -> torch.Tensor:
        with safe_open(self.files[0], "pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
            return found

    def close(self) -> None:
        FakeLoader.open -= 1


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    runai, fast = ModuleType("runai_model_streamer"), ModuleType("fastsafetensors")
    vars(runai)["SafetensorsStreamer"] = FakeStreamer
    vars(fast).update(SafeTensorsFileLoader=FakeLoader, SingleGroup=lambda: "single")
    monkeypatch.setitem(sys.modules, "runai_model_streamer", runai)
    monkeypatch.setitem(sys.modules, "fastsafetensors", fast)


@pytest.mark.parametrize("load_format", ["runai_streamer", "fastsafetensors"])
def test_streams_give_what_the_files_hold(tmp_path: Path, libraries: None, load_format: str) -> None:
    source = shards(tmp_path)
    stream = open_stream(load_format, source.facts, CPU)
    found = {name: to_torch(stream.get(name), "float32") for name in stream}
    assert found.keys() == source.facts.tensors.keys()
    assert all(torch.equal(found[name], to_torch(source.get(name), "float32")) for name in found)
    assert FakeLoader.open == 0


@pytest.mark.parametrize("wrong", [torch.zeros(4, dtype=torch.float16), torch.zeros(5)])
def test_streams_are_held_against_the_header(
    tmp_path: Path, libraries: None, wrong: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeStreamer, "changed", {"z1": wrong})
    with pytest.raises(CheckpointError, match=r"^the library gave .* the header says float32 \(4,\)") as caught:
        list(open_stream("runai_streamer", shards(tmp_path).facts, CPU))
    assert caught.value.value == "z1"


def test_a_tensor_that_a_stream_leaves_out(tmp_path: Path, libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStreamer, "get_tensors", lambda self: iter(()))
    with pytest.raises(CheckpointError) as caught:
        list(open_stream("runai_streamer", shards(tmp_path, 1).facts, CPU))
    assert caught.value.message == "the library did not give 2 tensors of model-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    ("load_format", "module", "package"),
    [
        ("fastsafetensors", "fastsafetensors", "fastsafetensors"),
        ("runai_streamer", "runai_model_streamer", "runai-model-streamer"),
    ],
)
def test_a_library_that_is_not_installed(
    tmp_path: Path, load_format: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        open_stream(load_format, shards(tmp_path, 1).facts, CPU)
    assert caught.value.message.startswith(f"load_format {load_format} needs the package {package}: ")
    assert (caught.value.field, caught.value.value) == ("model.load_format", load_format)
    assert caught.value.remedy == f"pip install {package}; or leave load_format out"


MEASURE = """
import sys, threading, time
import torch
from jackfield.checkpoint import open_tensors, read_facts
from jackfield.loader import ReadAhead
from jackfield.loader.weights import to_torch

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

facts = read_facts(sys.argv[1])
held = {name: torch.empty(tensor.shape) for name, tensor in facts.tensors.items()}
for tensor in held.values():
    tensor.zero_()
before, peak, done = resident(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.0005)

watcher = threading.Thread(target=watch)
watcher.start()
source = ReadAhead(open_tensors(facts), int(sys.argv[2]))
for name in source:
    held[name].copy_(to_torch(source.get(name), "float32"))
    peak = max(peak, resident())
done = True
watcher.join()
print(peak - before)
"""


@pytest.mark.parametrize("threads", [0, 4])
def test_loading_takes_less_than_a_fifth_more_than_the_largest_shard(tmp_path: Path, threads: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    sizes = []
    for number in range(1, 5):
        file = tmp_path / f"model-{number:05d}-of-00004.safetensors"
        save_file({f"t{number}.{part}": torch.ones(1 << 20) for part in range(12)}, file)
        sizes.append(file.stat().st_size)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(threads)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.5 * max(sizes) < int(run.stdout) < 1.2 * max(sizes)


def test_dtype_words_of_streams(tmp_path: Path, libraries: None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    tensors: dict[str, Any] = {"b": torch.ones(2, dtype=torch.bfloat16), "f": torch.ones(2).to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "model.safetensors")
    stream = open_stream("runai_streamer", read_facts(tmp_path), CPU)
    assert {name: stream.get(name).dtype for name in stream} == {name: t.dtype for name, t in tensors.items()}
