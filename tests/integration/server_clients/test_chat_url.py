"""``chat --url``."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
from scripted_server import ScriptedServer

from jackfield.cli import main

Serve = Callable[..., ScriptedServer]


def test_an_answer_is_streamed(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve()
    flags = ["--system", "be brief", "--temperature", "0", "--stop", "x", "--max-tokens", "3"]
    assert main(["chat", "--url", server.url, "--message", "hi", *flags]) == 0
    out, err = capsys.readouterr()
    assert out == "w0 w1 w2 \n"
    assert err.startswith("3 tokens in ") and err.endswith(f" tokens/s · scripted at {server.url}\n")
    (body,) = server.script.bodies
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    wanted = {"model": "scripted", "stream": True, "temperature": 0, "stop": ["x"], "max_tokens": 3}
    assert wanted.items() <= body.items()


def test_a_talk_remembers_what_was_said(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n\n"))
    assert main(["chat", "--url", server.url, "--model", "second", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "w0 w1 \nw0 w1 \n"
    talk = server.script.bodies[1]["messages"]
    assert [(turn["role"], turn["content"]) for turn in talk] == [
        ("user", "one"),
        ("assistant", "w0 w1 "),
        ("user", "two"),
    ]
    assert server.script.bodies[1]["model"] == "second"


def test_keys(serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(api_key="sk-1")
    line = ["chat", "--url", server.url, "--message", "hi", "--max-tokens", "1"]
    assert main(line) == 2
    assert "error: HTTP 401: a key is needed\n  remedy: give the server's key" in capsys.readouterr().err
    assert main([*line, "--api-key", "sk-1"]) == 0
    monkeypatch.setattr("jackfield.config.environment.process_environment", lambda: {"JACKFIELD_API_KEY": "sk-1"})
    assert main(line) == 0
    assert main([*line, "--api-key", "wrong"]) == 2


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--max-model-len", "4", "--config", "x.yaml"],
            "--max-model-len, --config has no effect on a server that runs already",
        ),
        (["--model", "secnd"], "did you mean 'second'?"),
    ],
)
def test_what_a_server_cannot_follow(
    serve: Serve, capsys: pytest.CaptureFixture[str], flags: list[str], text: str
) -> None:
    server = serve()
    assert main(["chat", "--url", server.url, "--message", "hi", *flags]) == 2
    assert text in capsys.readouterr().err
    assert server.script.bodies == []


def test_errors_of_the_server_are_told(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(fail_on="bad", break_on="ugly")
    assert main(["chat", "--url", server.url, "--message", "bad"]) == 2
    assert "error: HTTP 400: the prompt is refused" in capsys.readouterr().err
    assert main(["chat", "--url", server.url, "--message", "ugly"]) == 2
    assert "error: the connection broke: " in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:9", "--message", "hi"]) == 2
    assert "no server answers" in capsys.readouterr().err
