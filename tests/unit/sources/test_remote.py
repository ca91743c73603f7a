from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from jackfield.errors import CheckpointError, ConfigError, ModelNotFoundError
from jackfield.sources import remote, resolve_model

URL = "memory://bucket/model"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"x" * 100,
    "tokenizer.json": b"{}",
    "run.py": b"code",
    "sub/model.safetensors": b"other",
}


@pytest.fixture
def store() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    for name, raw in FILES.items():
        system.pipe(f"/bucket/model/{name}", raw)
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def test_a_model_is_fetched_once_without_code(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = resolve_model(URL, tmp_path, lambda *report: seen.append(report))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    assert folder.is_relative_to(tmp_path / "models" / "remote")
    assert seen[-1] == (f"download {URL}", 104, 104) and seen == sorted(seen)
    monkeypatch.setattr(remote, "_fetch", None)
    assert resolve_model(f"{URL}/", tmp_path) == folder


def test_modules_come_with_it_and_second_copies_do_not(store: Any, tmp_path: Path) -> None:
    for name in ("2_Dense/model.safetensors", "2_Dense/config.json", "2_Dense/x.py", "model.bin"):
        store.pipe(f"/bucket/model/{name}", b"more")
    folder = resolve_model(URL, tmp_path)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    plain = {"config.json", "model.safetensors", "tokenizer.json"}
    assert found == {*plain, "2_Dense/model.safetensors", "2_Dense/config.json"}
    store.rm("/bucket/model/model.safetensors")
    assert (resolve_model(URL, tmp_path) / "model.bin").read_bytes() == b"more"


def test_a_changed_model_is_fetched_again(store: Any, tmp_path: Path) -> None:
    before = resolve_model(URL, tmp_path)
    store.pipe("/bucket/model/model.safetensors", b"y" * 100)
    after = resolve_model(URL, tmp_path)
    assert after != before and (after / "model.safetensors").read_bytes() == b"y" * 100


def test_one_gguf_file(store: Any, tmp_path: Path) -> None:
    store.pipe("/bucket/m.gguf", b"GGUF")
    path = resolve_model("memory://bucket/m.gguf", tmp_path)
    assert (path.name, path.read_bytes()) == ("m.gguf", b"GGUF")


@pytest.mark.parametrize("url", ["memory://bucket/absent", "memory://bucket/absent.gguf"])
def test_nothing_is_there(store: Any, tmp_path: Path, url: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(url, tmp_path)
    assert (caught.value.field, caught.value.value) == ("model", url)
    assert caught.value.message.startswith("the store did not give this model: FileNotFoundError: ")


def test_a_folder_without_model_files(store: Any, tmp_path: Path) -> None:
    store.pipe("/bucket/code/run.py", b"code")
    with pytest.raises(ModelNotFoundError, match="there is no model at this address"):
        resolve_model("memory://bucket/code", tmp_path)


def test_the_cache_serves_when_the_store_cannot_be_reached(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model(URL, tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(type(store), "ls", fail)
    assert resolve_model(URL, tmp_path) == folder
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("memory://bucket/other", tmp_path)
    assert caught.value.message == "the store did not give this model: ConnectionError: no route"


def test_a_file_of_another_size_leaves_nothing(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(store).ls

    def short(self: Any, path: str, detail: bool = True, **options: Any) -> Any:
        return [{**entry, "size": 10} for entry in real(self, path, detail=True, **options)]

    monkeypatch.setattr(type(store), "ls", short)
    with pytest.raises(CheckpointError, match=r"config\.json has 2 bytes or more, the store says 10"):
        resolve_model(URL, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["..", "a\\b.json", "a:b.json", "a\nb.json"])
def test_names_that_a_store_may_not_have(
    store: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"name": f"/bucket/model/{name}", "size": 2, "type": "file"}
    monkeypatch.setattr(type(store), "ls", lambda *_, **__: [entry])
    with pytest.raises(CheckpointError, match="the store names a file"):
        resolve_model(URL, tmp_path)


def test_a_full_disk_is_told_before_fetching(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 50})
    monkeypatch.setattr("jackfield.sources.remote.shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="the model takes 104 bytes, more than the disk has free"):
        resolve_model(URL, tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense://x/y", "the scheme nonsense is unknown"),
        ("file:///etc", "this is no address of an object store"),
        ("memory://x::file:///etc", "this is no address of an object store"),
    ],
)
def test_addresses_that_are_refused(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(url, tmp_path)
    assert message in caught.value.message and caught.value.value == url and caught.value.remedy


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("https", "aiohttp")])
def test_a_store_whose_package_is_not_installed(
    tmp_path: Path, scheme: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(url: str) -> None:
        raise ImportError(f"install {package}")

    monkeypatch.setattr("fsspec.core.url_to_fs", lacking)
    with pytest.raises(ConfigError) as caught:
        resolve_model(f"{scheme}://bucket/model", tmp_path)
    assert caught.value.message == f"this address needs the package {package}, which is not installed"
    assert caught.value.remedy == f"pip install {package}; or pip install 'jackfield[remote]' for all stores"


def test_fsspec_itself_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match="this address needs the package fsspec"):
        resolve_model(URL, tmp_path)
