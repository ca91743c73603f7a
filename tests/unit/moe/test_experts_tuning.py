"""Launches: rules, files, the search, and the command that writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jackfield.cli import main
from jackfield.errors import ConfigError
from jackfield.interfaces import ExpertsRequest
from jackfield.interfaces.moe import Tuned
from jackfield_moe.torch_experts import TorchExperts
from jackfield_moe.triton_plan import (
    FEW_ROWS,
    MEASURED,
    Launch,
    default_launch,
    default_plan,
    file_name,
    has_copy_engine,
    plan_content,
    plan_for,
    read_plan,
)
from jackfield_moe.triton_tune import ROWS, neighbours, search, tune

REQUEST = ExpertsRequest(
    num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, dtype="bfloat16", kind="dense"
)
FAST = Launch(32, 64, 64, 16, 4, 3)


def test_rules_grow_with_the_rows_of_an_expert() -> None:
    plan = default_plan(REQUEST)
    assert [plan.of(rows)[0].rows for rows in (1, 64, 200, 500, 1024, 1040, 9000)] == [16, 16, 32, 64, 64, 128, 128]
    assert plan.of(1) == (default_launch(8, 128, 2),) * 2
    assert plan.source == "rules"


def test_a_search_finds_what_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield_moe.triton_tune.ROWS", (1, 64))
    lines: list[str] = []

    def away(launch: Launch, wanted: Launch) -> int:
        return sum(one != other for one, other in zip(astuple(launch), astuple(wanted), strict=True))

    def measure(rows: int, up: Launch, down: Launch) -> float:
        wanted = FAST if rows == 64 else replace(FAST, rows=16)
        return 1.0 + away(up, wanted) + away(down, replace(wanted, stages=2))

    plan = search(REQUEST, measure, lines.append, copy_engine=True)
    assert plan.of(64) == (FAST, replace(FAST, stages=2))
    assert plan.of(63) == (replace(FAST, rows=16), replace(FAST, rows=16, stages=2))
    assert [line.split(":")[0] for line in lines] == ["1 rows", "64 rows"]


def test_neighbours_fit_and_change_one_number() -> None:
    pair = (FAST, replace(FAST, rows=64))
    found = list(neighbours(pair, 2, copy_engine=True))
    assert len(set(found)) > 20
    assert (FAST, replace(FAST, rows=64, tma=True)) in found and (
        replace(FAST, rows=16),
        replace(FAST, rows=16),
    ) in found
    assert not any(launch.tma for near in neighbours(pair, 2) for launch in near)
    large = replace(FAST, rows=128, columns=256, depth=64, stages=3)
    assert all(replace(large, stages=4) != up for up, _ in neighbours((large, large), 2))
    assert ROWS[0] == FEW_ROWS + 1


@pytest.mark.parametrize("place", range(len(MEASURED)))
def test_the_search_can_leave_where_it_starts(place: int) -> None:
    _, up, down = MEASURED[place]
    near = list(neighbours((up, down), 2, copy_engine=True))
    assert any(one == down for _, one in near) and any(one == up for one, _ in near)


@pytest.mark.parametrize(("capability", "there"), [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_measured_tiles_are_for_devices_that_they_fit(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], there: bool
) -> None:
    monkeypatch.setattr("jackfield_moe.triton_plan.find_spec", lambda name: object())
    assert has_copy_engine(capability) is there


def test_rules_of_devices_with_a_copy_engine_are_those_measured() -> None:
    plan = default_plan(REQUEST, hopper=True)
    for rows, place in [(1, 0), (64, 0), (256, 1), (512, 2), (2048, 3), (8192, 4)]:
        assert plan.of(rows) == MEASURED[place][1:]
    bare = default_plan(replace(REQUEST, gated=False), hopper=True)
    assert bare.of(64) == (MEASURED[0][2],) * 2
    assert default_plan(replace(REQUEST, kind="int4"), hopper=True) == default_plan(replace(REQUEST, kind="int4"))


def test_files_are_found_by_sizes_type_layout_and_device(tmp_path: Path) -> None:
    assert file_name(REQUEST, "NVIDIA H200") == "X128-S8-E2048-F768-bfloat16-dense-NVIDIA_H200"
    content = plan_content(replace(default_plan(REQUEST), up=((1, FAST),)))
    (tmp_path / f"{file_name(REQUEST, 'A B')}.json").write_text(json.dumps(content))
    folders = (tmp_path / "absent", tmp_path)
    found = plan_for(REQUEST, "A B", folders)
    assert found.up == ((1, FAST),) and found.down == default_plan(REQUEST).down
    assert found.source.endswith("A_B.json")
    assert plan_for(REQUEST, "A C", folders).source == "rules"
    assert plan_for(replace(REQUEST, top_k=4), "A B", folders).source == "rules"


@pytest.mark.parametrize("text", ["", "{}", '{"up": {"x": {}}, "down": {}}', '{"up": {}, "down": {}}', "[]"])
def test_files_that_no_tuner_wrote(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_plan(path)
    assert caught.value.message.startswith("a file of tuned launches cannot be read: ")
    assert caught.value.value == str(path)
    assert caught.value.remedy == "delete it, or write it again with: jackfield tune moe MODEL"


def test_there_is_nothing_to_measure_on_without_a_device() -> None:
    with pytest.raises(ConfigError) as caught:
        tune(REQUEST, "", lambda line: None)
    assert caught.value.message == "there is no device to measure on"


CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def model(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(folder)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.config.load.process_environment", dict)


def test_the_command_writes_what_the_backend_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = SimpleNamespace(request=None)

    def found(request: ExpertsRequest, progress: Callable[[str], None]) -> Tuned:
        asked.request = request
        progress("measuring")
        return Tuned("name", {"up": {}}, ("a note",))

    monkeypatch.setattr(TorchExperts, "tune", found)
    assert main(["tune", "moe", model(tmp_path), "--output", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'out' / 'name.json'}\n" and err == "measuring\na note\n"
    assert json.loads((tmp_path / "out" / "name.json").read_text()) == {"up": {}}
    request = asked.request
    assert (request.num_experts, request.top_k, request.hidden_size, request.intermediate_size) == (4, 2, 16, 8)
    assert (request.kind, request.dtype) == ("dense", "float32")


def test_a_backend_that_has_nothing_to_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "moe", model(tmp_path)]) == 2
    expected = "error: the chosen experts backend has nothing to tune\n  field: moe = 'torch'\n"
    assert capsys.readouterr().err == f"{expected}  remedy: name another one with --moe.force\n"


def test_a_model_without_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path, num_experts=0)
    assert main(["tune", "moe", path]) == 2
    expected = f"error: there is nothing to tune: the model has no experts\n  field: model.model = '{path}'\n"
    assert capsys.readouterr().err == expected
