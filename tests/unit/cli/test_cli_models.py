"""``jackfield models``."""

from __future__ import annotations

import json

import pytest

from jackfield.cli import main

LLAMA = {
    "architecture": "LlamaForCausalLM",
    "how": "native",
    "tasks": ["generate", "pool"],
    "gguf": ["llama"],
    "distribution": "jackfield",
    "summary": "Llama 1 to 3 and models saved as such",
}


def test_architectures_are_listed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert LLAMA in rows
    assert [row["architecture"] for row in rows] == sorted(row["architecture"] for row in rows)


def test_architectures_are_listed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["architecture", "how", "tasks", "gguf", "distribution", "summary"]
    assert any(line.split()[:5] == ["LlamaForCausalLM", "native", "generate,", "pool", "llama"] for line in lines)


def test_a_disabled_architecture_is_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json", "--plugins.disable", "models.LlamaForCausalLM"]) == 0
    assert LLAMA not in json.loads(capsys.readouterr().out)
