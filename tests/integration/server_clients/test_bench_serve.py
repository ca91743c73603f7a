"""``bench serve`` against a server whose delays are known."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from jackfield.cli import main

Serve = Callable[..., ScriptedServer]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SLACK_MS = 15.0
"""For a busy machine: sleeps end late, never early."""


def bench(server: ScriptedServer, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Run the command and return its exit code and its JSON."""
    file = folder / "bench.json"
    code = main(["bench", "serve", "--url", server.url, "--output", str(file), *flags])
    return code, json.loads(file.read_text())


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_latencies_are_those_of_the_script(serve: Serve, tmp_path: Path, endpoint: str) -> None:
    server = serve(first_s=0.12, gap_s=0.03)
    flags = ["--num-prompts", "6", "--output-len", "9", "--max-concurrency", "3", "--endpoint", endpoint]
    code, figures = bench(server, tmp_path, *flags)
    assert code == 0
    assert (figures["completed"], figures["failed"]) == (6, 0)
    expected = {"ttft": 120.0, "tpot": 30.0, "itl": 30.0, "e2el": 120.0 + 8 * 30}
    for name, milliseconds in expected.items():
        assert (
            milliseconds - 1 <= figures[f"median_{name}_ms"] <= milliseconds + (8 if name == "e2el" else 1) * SLACK_MS
        ), name
    assert server.script.most_running == 3
    assert figures["duration"] == pytest.approx(2 * 0.36, abs=0.25)
    assert figures["output_throughput"] == pytest.approx(54 / figures["duration"], rel=1e-3)


def test_tokens_are_counted_by_the_server_and_prompts_are_ids_where_it_tokenizes(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    _, figures = bench(
        server, tmp_path, "--num-prompts", "4", "--input-len", "12", "--output-len", "3", "--prefix-len", "2"
    )
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (4 * 14, 12)
    assert figures["prompts_as_token_ids"] is True
    bodies = server.script.bodies
    assert len(bodies) == 1 + 4, "one request warms up"
    assert len({tuple(body["prompt"][:2]) for body in bodies}) == 1
    assert {body["max_tokens"] for body in bodies} == {3}
    assert {body["model"] for body in bodies} == {"scripted"}


def test_without_a_tokenizer_prompts_are_text(serve: Serve, tmp_path: Path) -> None:
    server = serve(tokenizes=False)
    flags = ["--num-prompts", "2", "--input-len", "7", "--model", "second", "--temperature", "0", "--ignore-eos"]
    _, figures = bench(server, tmp_path, *flags, "--warmup", "0")
    assert figures["prompts_as_token_ids"] is False
    assert figures["total_input_tokens"] == 14
    assert [len(body["prompt"].split()) for body in server.script.bodies] == [7, 7]
    wanted = {"model": "second", "temperature": 0, "ignore_eos": True}
    assert all(wanted.items() <= body.items() for body in server.script.bodies)


def test_requests_arrive_at_the_rate(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    flags = [
        "--num-prompts",
        "40",
        "--output-len",
        "1",
        "--request-rate",
        "50",
        "--burstiness",
        "1000000",
        "--detailed",
    ]
    _, figures = bench(server, tmp_path, *flags)
    sent = [entry["sent"] for entry in figures["requests"]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.02, rel=0.1)
    assert figures["median_send_delay_ms"] < SLACK_MS


def test_failures_are_counted_and_shown(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(fail_on="bad", break_on="ugly")
    lines = [{"prompt": word} for word in ("good", "bad 1", "ugly", "bad 2", "good", "good")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    code, figures = bench(server, tmp_path, "--dataset", "prompts", "--dataset-path", str(file), "--output-len", "3")
    assert code == 0
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (3, 3, 9)
    errors = {entry["error"]: entry["count"] for entry in figures["errors"]}
    assert errors.pop("HTTP 400: the prompt is refused") == 2
    ((broken, count),) = errors.items()
    assert broken.startswith("the connection broke: ") and count == 1
    out = capsys.readouterr().out
    assert "3 completed, 3 failed" in out and "failed 2×: HTTP 400: the prompt is refused" in out


def test_a_stream_without_usage_is_a_failure(serve: Serve, tmp_path: Path) -> None:
    code, figures = bench(serve(usage=False), tmp_path, "--num-prompts", "2", "--warmup", "0")
    assert (code, figures["completed"]) == (1, 0)
    assert figures["errors"] == [
        {"error": "the stream held no usage, so that nothing can be said of its tokens", "count": 2}
    ]
    assert figures["mean_ttft_ms"] is None


def test_a_request_that_takes_too_long_is_a_failure(serve: Serve, tmp_path: Path) -> None:
    code, figures = bench(serve(first_s=5.0), tmp_path, "--num-prompts", "1", "--warmup", "0", "--timeout-s", "0.2")
    assert code == 1
    assert figures["errors"] == [{"error": "no whole answer within 0.2 s", "count": 1}]


def test_goodput(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(first_s=0.05)
    flags = ["--num-prompts", "4", "--output-len", "2", "--goodput", "ttft:1000", "tpot:1000"]
    _, figures = bench(server, tmp_path, *flags)
    assert figures["request_goodput"] == figures["request_throughput"] > 0
    assert figures["goals_ms"] == {"ttft": 1000.0, "tpot": 1000.0}
    _, figures = bench(server, tmp_path, *flags[:4], "--goodput", "ttft:20")
    assert figures["request_goodput"] == 0
    assert "0.00 good requests/s" in capsys.readouterr().out


def test_a_sweep_is_drawn(serve: Serve, tmp_path: Path) -> None:
    server = serve(first_s=0.02, gap_s=0.01)
    image = tmp_path / "p.svg"
    flags = ["--num-prompts", "8", "--output-len", "4", "--sweep", "1,2,4", "--picture", str(image)]
    code, figures = bench(server, tmp_path, *flags)
    assert code == 0
    assert [run["max_concurrency"] for run in figures["runs"]] == [1, 2, 4]
    rates = [run["output_throughput"] for run in figures["runs"]]
    assert rates[0] < rates[1] < rates[2]
    prompts = [tuple(body["prompt"]) for body in server.script.bodies]
    assert len(prompts) == len(set(prompts)) == 1 + 3 * 8, "no run sends what a cache may know"
    root = ET.fromstring(image.read_text())
    space = "{http://www.w3.org/2000/svg}"
    hints = [circle.findtext(f"{space}title") or "" for circle in root.iter(f"{space}circle")]
    assert len(hints) == 2 * 4 * 3, "two panels, median and three percentiles, three runs"
    assert [hint for hint in hints if hint.startswith("median")][:3] == [
        f"median: {run['median_ttft_ms']:g} ms at {run['output_throughput']:g} tokens/s" for run in figures["runs"]
    ]


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert "error: no server answers: " in err and "field: --url = 'http://127.0.0.1:9'" in err
    assert "remedy: start one with `jackfield serve MODEL`" in err


def test_a_server_that_refuses_all_is_an_error_before_anything_is_measured(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(fail_on=".", fail_status=500)
    assert main(["bench", "serve", "--url", server.url, "--num-prompts", "5", "--warmup", "2"]) == 2
    assert "the server refuses such requests: HTTP 500: the prompt is refused" in capsys.readouterr().err
    assert len(server.script.bodies) == 2


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--model", "scriptd"], "did you mean 'scripted'?"),
        (["--endpoint", "/v1/chat"], "unknown endpoint"),
        (["--sweep", "1,2", "--max-concurrency", "3"], "--sweep sets --max-concurrency in each run"),
        (["--sweep", "1", "--sweep-by", "time"], "concurrency or rate"),
        (["--max-concurrency", "0"], "must be at least 1"),
        (["--warmup", "-1"], "must be at least 0"),
        (["--timeout-s", "0"], "must be more than 0"),
        (["--detailed"], "details are written to a file"),
        (["--output", "/absent/x.json"], "lies in a folder that does not exist"),
        (["--picture", "/tmp"], "is a folder"),
        (["--percentiles", "200"], "percentiles are numbers from 0 to 100"),
        (["--goodput", "x:1"], "metrics are ttft, tpot, e2el"),
    ],
)
def test_wrong_flags(serve: Serve, capsys: pytest.CaptureFixture[str], flags: list[str], text: str) -> None:
    server = serve()
    assert main(["bench", "serve", "--url", server.url, *flags]) == 2
    assert text in capsys.readouterr().err
    assert server.script.bodies == []


def test_a_key_is_sent(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(api_key="sk-1")
    assert bench(server, tmp_path, "--api-key", "sk-1", "--num-prompts", "1")[0] == 0
    assert main(["bench", "serve", "--url", server.url]) == 2
    assert "give the server's key by --api-key or JACKFIELD_API_KEY" in capsys.readouterr().err


def test_an_interruption_reports_what_was_measured(
    serve: Serve, tmp_path: Path, start_command: Callable[..., subprocess.Popen[str]]
) -> None:
    server = serve(first_s=0.05, gap_s=0.02)
    file = tmp_path / "o.json"
    flags = ["--num-prompts", "500", "--output-len", "5", "--max-concurrency", "2", "--output", str(file)]
    process = start_command("bench", "serve", "--url", server.url, *flags)
    end = time.monotonic() + 20
    while len(server.script.bodies) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    figures = json.loads(file.read_text())
    assert figures["interrupted"] is True
    assert figures["completed"] >= 1 and 1 <= figures["unfinished"] <= 2
    assert figures["failed"] == 0
    counts = ("completed", "unfinished", "unsent")
    assert sum(figures[name] for name in counts) == 500
    assert f"{figures['completed']} completed, 0 failed, {figures['unfinished']} unfinished" in out
