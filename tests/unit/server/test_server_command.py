"""``jackfield serve`` and the settings of the server."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from jackfield.cli import main
from jackfield.config import EngineConfig, load_config


def test_serve_hands_its_configuration_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []

    def run(config: EngineConfig) -> int:
        seen.append(config)
        return 3

    monkeypatch.setattr("jackfield.server.operations.run.serve", run)
    line = ["serve", "some/model", "--port", "9", "--served-model-name", "a,b", "--max-body-bytes", "1MiB"]
    assert main(line) == 3
    [config] = seen
    assert (config.model.model, config.server.port, config.server.max_body_bytes) == ("some/model", 9, 1024**2)
    assert config.server.served_model_name == ("a", "b")


def test_serve_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "no model is set" in capsys.readouterr().err


def test_serve_names_the_package_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("jackfield.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve", "some/model"]) == 2
    error = capsys.readouterr().err
    assert "the server needs the package 'fastapi'" in error and "pip install 'jackfield[serve]'" in error


@pytest.mark.parametrize("form", [[], ["--json"], ["--origin"]])
def test_keys_are_not_shown(form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--api-key", "hush-1,hush-2", *form]) == 0
    shown = capsys.readouterr().out
    assert "hush" not in shown and "***" in shown


def test_the_server_is_no_part_of_the_digest() -> None:
    def digest(**settings: Any) -> str:
        return load_config(api={"model": "m", **settings}, env={}).digest()

    assert digest() == digest(port=1, api_key=("x",), max_body_bytes="1MiB") != digest(seed=1)


@pytest.mark.parametrize(
    ("setting", "value"), [("port", 70000), ("max_body_bytes", "many"), ("log_format", "xml"), ("max_logprobs", -1)]
)
def test_wrong_settings_are_refused(setting: str, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", f"--{setting.replace('_', '-')}", str(value)]) == 2
    assert f"server.{setting}" in capsys.readouterr().err
