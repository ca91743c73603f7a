"""Names of models that are written whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from jackfield.engine.model_export import model_name


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("hf:Org/Name-1.5B", "Name-1.5B"),
        ("hf:Org/Name@refs/pr/1", "Name"),
        ("Org/Name", "Name"),
        ("pypi:some-model==1.2", "some-model"),
        ("s3://bucket/folder/name/", "name"),
        ("/no/such/a b", "a-b"),
        ("..", "model"),
    ],
)
def test_names(word: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert model_name(word) == name


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model@1"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert model_name(".") == model_name(str(folder)) == model_name(f"{folder}/") == "model-1"
