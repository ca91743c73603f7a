"""``run-batch`` against a server, and in this process."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf import Tiny
from scripted_server import ScriptedServer

from jackfield.cli import main

Serve = Callable[..., ScriptedServer]
Start = Callable[..., subprocess.Popen[str]]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def request(name: str, prompt: Any, url: str = COMPLETIONS, **body: Any) -> str:
    key = "messages" if url == CHAT else "prompt"
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {key: prompt, **body}})


def write(folder: Path, *lines: str) -> tuple[Path, Path]:
    """Write the input; return it and the path of the output."""
    source = folder / "in.jsonl"
    source.write_text("".join(f"{line}\n" for line in lines))
    return source, folder / "out.jsonl"


def run(source: Path, target: Path, *more: str) -> int:
    return main(["run-batch", "-i", str(source), "-o", str(target), *more])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_errors_and_bad_lines(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(fail_on="bad", tokens=2)
    talk = [{"role": "user", "content": "hi"}]
    lines = [request("a", "x"), "{", request("b", talk, CHAT, max_tokens=3), request("c", "bad"), request("a", "y")]
    source, target = write(tmp_path, *lines)
    assert run(source, target, "--url", server.url) == 0
    found = {entry["custom_id"] or entry["error"]["line"]: entry for entry in read(target)}
    assert set(found) == {"a", 2, "b", "c", 5}
    assert len({entry["id"] for entry in found.values()}) == 5
    answer = found["a"]["response"]
    assert (answer["status_code"], answer["body"]["choices"][0]["text"], found["a"]["error"]) == (200, "w0 w1", None)
    assert answer["request_id"].startswith("rid-")
    assert found["b"]["response"]["body"]["choices"][0]["message"]["content"] == "w0 w1 w2"
    assert found["c"]["response"]["status_code"] == 400
    assert found["c"]["response"]["body"]["error"]["message"] == "the prompt is refused"
    assert found[2]["error"]["code"] == "invalid_line" and found[2]["error"]["message"].startswith("line 2: no JSON: ")
    assert found[5]["error"]["message"] == "line 5: custom_id 'a' was used on line 1 already"
    assert capsys.readouterr().err.endswith("2 succeeded, 3 failed, 0 were done before\n")


def test_concurrency_is_bounded(serve: Serve, tmp_path: Path) -> None:
    server = serve(first_s=0.02, tokens=1)
    source, target = write(tmp_path, *(request(f"r{n}", "x") for n in range(20)))
    assert run(source, target, "--url", server.url, "--max-concurrency", "4") == 0
    assert server.script.most_running == 4
    assert sorted(entry["custom_id"] for entry in read(target)) == sorted(f"r{n}" for n in range(20))


def test_a_run_that_was_killed_goes_on_where_it_was(serve: Serve, tmp_path: Path, start_command: Start) -> None:
    server = serve(first_s=0.03, tokens=1)
    names = [f"r{n}" for n in range(60)]
    source, target = write(tmp_path, *(request(name, "x") for name in names), "no json")
    arguments = ["run-batch", "-i", str(source), "-o", str(target), "--url", server.url, "--max-concurrency", "3"]
    process = start_command(*arguments)
    end = time.monotonic() + 20
    while not (target.exists() and target.read_bytes().count(b"\n") >= 10) and time.monotonic() < end:
        time.sleep(0.005)
    process.kill()
    process.wait(10)
    before = target.read_bytes()
    done = before.count(b"\n")
    assert 10 <= done < 60
    # As if the kill had come in the middle of a write.
    whole, last = before[: before.rstrip(b"\n").rfind(b"\n") + 1], before.splitlines()[-1]
    target.write_bytes(whole + last[: len(last) // 2])
    asked = len(server.script.bodies)
    assert run(source, target, "--url", server.url) == 0
    entries = read(target)
    assert sorted(entry["custom_id"] for entry in entries if entry["custom_id"]) == sorted(names)
    assert [entry["error"]["line"] for entry in entries if entry["custom_id"] is None] == [61]
    assert target.read_bytes().startswith(whole)
    assert len(server.script.bodies) - asked == 60 - (done - 1), "what was done is not asked again"
    assert run(source, target, "--url", server.url) == 0
    assert read(target) == entries


def test_an_interrupted_run_can_go_on(serve: Serve, tmp_path: Path, start_command: Start) -> None:
    server = serve(first_s=0.05, tokens=1)
    source, target = write(tmp_path, *(request(f"r{n}", "x") for n in range(100)))
    process = start_command(
        "run-batch", "-i", str(source), "-o", str(target), "--url", server.url, "--max-concurrency", "2"
    )
    end = time.monotonic() + 20
    while len(server.script.bodies) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err.rstrip().endswith("interrupted; the same command goes on from here")
    assert 1 <= len(read(target)) < 100


def test_a_busy_server_is_asked_again(serve: Serve, tmp_path: Path) -> None:
    server = serve(busy=3, tokens=1)
    source, target = write(tmp_path, request("a", "x"))
    assert run(source, target, "--url", server.url) == 0
    assert read(target)[0]["response"]["status_code"] == 200
    assert len(server.script.bodies) == 4
    server.script.busy = 9
    again = tmp_path / "again.jsonl"
    assert run(source, again, "--url", server.url, "--retries", "1") == 0
    assert read(again)[0]["response"]["status_code"] == 503
    assert len(server.script.bodies) == 6


def test_failed_requests_are_run_again_on_demand(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(fail_on="bad", tokens=1)
    source, target = write(tmp_path, request("a", "x"), request("b", "bad"))
    assert run(source, target, "--url", server.url) == 0
    server.script.fail_on = None
    assert run(source, target, "--url", server.url) == 0
    assert {entry["custom_id"]: entry["response"]["status_code"] for entry in read(target)} == {"a": 200, "b": 400}
    assert run(source, target, "--url", server.url, "--retry-failed") == 0
    assert {entry["custom_id"]: entry["response"]["status_code"] for entry in read(target)} == {"a": 200, "b": 200}
    assert capsys.readouterr().err.endswith("1 succeeded, 0 failed, 1 were done before\n")


def test_a_server_that_goes_away_ends_the_run_without_lines_for_the_rest(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(tokens=1)
    source, target = write(tmp_path, *(request(f"r{n}", "x") for n in range(4)))
    url = server.url
    assert run(source, target, "--url", url) == 0
    server.stop()
    more, _ = write(tmp_path, *(request(f"r{n}", "x") for n in range(9)))
    assert run(more, target, "--url", url, "--retries", "0") == 2
    assert "no server answers" in capsys.readouterr().err
    assert len(read(target)) == 4


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["m", "--url", "http://h"], "a batch runs either here or on a server"),
        (["--url", "http://h", "--max-model-len", "5"], "--max-model-len has no effect on a server that runs already"),
        (
            ["--max-concurrency", "0", "--retries", "-1"],
            "--max-concurrency must be at least 1; --retries must be at least 0",
        ),
        ([], "model"),
    ],
)
def test_wrong_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], text: str) -> None:
    source, target = write(tmp_path, request("a", "x"))
    assert run(source, target, *flags) == 2
    assert text in capsys.readouterr().err


def test_wrong_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path, request("a", "x"))
    assert run(tmp_path / "absent", target, "--url", "http://h") == 2
    assert "the input file cannot be read" in capsys.readouterr().err
    assert run(source, source, "--url", "http://h") == 2
    assert "input and output are the same file" in capsys.readouterr().err
    assert source.read_text().count("custom_id") == 1


def test_a_model_runs_in_this_process(text_model: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [request(f"r{n}", "ab" * (n + 1), max_tokens=4, temperature=0, ignore_eos=True) for n in range(5)]
    source, target = write(tmp_path, *lines, request("long", "a" * 5000), request("other", "a", model="gpt"))
    assert run(source, target, str(text_model.folder), "--kv-cache-memory", "16MiB", "--max-model-len", "64") == 0
    found = {entry["custom_id"]: entry["response"] for entry in read(target)}
    for n in range(5):
        usage = found[f"r{n}"]["body"]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 * (n + 1), 4)
        assert found[f"r{n}"]["request_id"] == found[f"r{n}"]["body"]["id"]
    assert (found["long"]["status_code"], found["other"]["status_code"]) == (400, 404)
    assert "5 succeeded, 2 failed" in capsys.readouterr().err
