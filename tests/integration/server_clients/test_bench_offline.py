"""``bench latency`` and ``bench throughput`` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hf import Tiny

from jackfield.cli import main


def bench(model: Tiny, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = folder / "bench.json"
    kind, *flags = arguments
    engine = ["--kv-cache-memory", "16MiB", "--max-model-len", "128"]
    code = main(["bench", kind, str(model.folder), "--output", str(file), *engine, *flags])
    return code, json.loads(file.read_text())


def test_latency_of_a_batch(text_model: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-size", "3", "--input-len", "10", "--output-len", "6", "--warmup", "1", "--iterations", "4"]
    code, figures = bench(text_model, tmp_path, "latency", *sizes, "--percentiles", "50")
    assert code == 0
    assert (figures["rounds"], figures["completed"]) == (4, 12)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (4 * 3 * 10, 4 * 3 * 6)
    rounding = 0.6e-4 / figures["duration"]  # the duration is told in tenths of a millisecond
    assert figures["mean_latency_ms"] == pytest.approx(figures["duration"] / 4 * 1000, rel=rounding)
    assert 0 < figures["median_ttft_ms"] < figures["p50_e2el_ms"] <= figures["p50_latency_ms"]
    steps = figures["median_e2el_ms"] - figures["median_ttft_ms"]
    assert figures["median_tpot_ms"] == pytest.approx(steps / 5, rel=0.25)
    assert figures["output_throughput"] == pytest.approx(72 / figures["duration"], rel=rounding)
    assert figures["engine"] in capsys.readouterr().err


def test_every_round_computes_its_prompts(text_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jackfield.benchmarking import offline

    seen: list[int] = []
    report = offline.offline_report

    def spy(rounds: Any, percentiles: Any) -> Any:
        seen.extend(output.num_cached_tokens for one in rounds for output in one.outputs)
        return report(rounds, percentiles)

    monkeypatch.setattr(offline, "offline_report", spy)
    sizes = ["--batch-size", "2", "--input-len", "64", "--output-len", "2", "--warmup", "1", "--iterations", "2"]
    assert bench(text_model, tmp_path, "latency", *sizes)[0] == 0
    assert seen == [0] * 4


def test_throughput_of_prompts_from_a_file(text_model: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    lines = [{"prompt": "a" * n, "max_tokens": n} for n in range(1, 9)] + [{"prompt": [7, 8, 9], "max_tokens": 2}]
    file.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--dataset", "prompts", "--dataset-path", str(file), "--ignore-eos", "--temperature", "0"]
    code, figures = bench(text_model, tmp_path, "throughput", *flags, "--iterations", "2")
    assert code == 0
    assert (figures["num_prompts"], figures["completed"]) == (9, 18)
    assert figures["total_input_tokens"] == 2 * (36 + 3)
    assert figures["total_output_tokens"] == 2 * (36 + 2)
    assert figures["sampling"] == {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--iterations", "0"], "must be at least 1"),
        (["--warmup", "-1"], "must be at least 0"),
        (["--dataset", "prompts"], "read from a file"),
        (["--input-len", "0"], "--input-len must be at least 1"),
        (["--output", "/absent/x"], "lies in a folder that does not exist"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flags: list[str], text: str) -> None:
    assert main(["bench", "throughput", "m", *flags]) == 2
    assert text in capsys.readouterr().err


def test_prompts_repeat_from_run_to_run_and_change_with_the_seed(
    text_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jackfield.benchmarking import offline

    seen: list[Any] = []
    run_rounds = offline.run_rounds

    def spy(llm: Any, work: Any, *more: Any) -> Any:
        seen.append(work.prompts)
        return run_rounds(llm, work, *more)

    monkeypatch.setattr(offline, "run_rounds", spy)
    sizes = ["--num-prompts", "2", "--input-len", "8", "--output-len", "1", "--warmup", "0"]
    for seed in ([], [], ["--seed", "5"]):
        assert bench(text_model, tmp_path, "throughput", *sizes, *seed)[0] == 0
    assert seen[0] == seen[1] != seen[2]
    assert [len(prompt["prompt_token_ids"]) for prompt in seen[0]] == [8, 8]
