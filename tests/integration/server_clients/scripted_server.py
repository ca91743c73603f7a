"""A small server of OpenAI's API on a free port, whose delays and faults are scripted."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

MODEL = "scripted"


@dataclass
class Script:
    """How requests are answered.

    Args:
        first_s: before the first token. gap_s: before each further one. tokens: of an answer whose request sets no
            limit. api_key: that requests must bring. fail_on: prompts that match get ``fail_status``. break_on: prompts
            that match lose their connection after the first token. busy: how many requests are turned away with 503.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    tokens: int = 5
    api_key: str | None = None
    fail_on: str | None = None
    fail_status: int = 400
    break_on: str | None = None
    busy: int = 0
    tokenizes: bool = True
    usage: bool = True
    role_first: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0


def build(script: Script) -> FastAPI:
    """Return the application."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if script.api_key and request.headers.get("authorization") != f"Bearer {script.api_key}":
            return _error(401, "a key is needed")
        return JSONResponse({"object": "list", "data": [{"id": MODEL}, {"id": "second"}]})

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        if not script.tokenizes:
            return _error(404, "Not Found")
        words = (await request.json())["prompt"].split()
        return JSONResponse({"count": len(words), "tokens": [100 + len(word) for word in words]})

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(request: Request) -> Response:
        body = await request.json()
        script.bodies.append(body)
        if script.busy:
            script.busy -= 1
            return _error(503, "busy", {"retry-after": "0"})
        text = json.dumps(body.get("prompt", body.get("messages")))
        if script.fail_on and re.search(script.fail_on, text):
            return _error(script.fail_status, "the prompt is refused")
        answer = Answer(
            script, body, chat="messages" in body, breaks=script.break_on is not None and script.break_on in text
        )
        if body.get("stream"):
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        return JSONResponse(await answer.whole(), headers={"x-request-id": f"rid-{len(script.bodies)}"})

    return app


class Answer:
    """One answer: the words w0, w1 and so on."""

    def __init__(self, script: Script, body: dict[str, Any], *, chat: bool, breaks: bool) -> None:
        self._script, self._chat, self._breaks = script, chat, breaks
        self._count = body.get("max_tokens") or script.tokens
        prompt = body.get("prompt") or " ".join(m["content"] for m in body.get("messages", ()))
        self._usage = {"prompt_tokens": len(prompt.split() if isinstance(prompt, str) else prompt)}
        self._usage["completion_tokens"] = self._count

    async def whole(self) -> dict[str, Any]:
        async for _ in self.events():
            pass
        text = " ".join(f"w{n}" for n in range(self._count))
        part = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {"id": "gen-1", "choices": [{"index": 0, **part, "finish_reason": "length"}], "usage": self._usage}

    async def events(self) -> AsyncIterator[bytes]:
        script = self._script
        script.running += 1
        script.most_running = max(script.most_running, script.running)
        try:
            if self._chat and script.role_first:
                yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for number in range(self._count):
                await asyncio.sleep(script.gap_s if number else script.first_s)
                yield self._token(f"w{number} ", None)
                if self._breaks:
                    raise ConnectionResetError("scripted")
            yield self._token("", "length")
            if script.usage:
                yield _event({"choices": [], "usage": self._usage})
            yield b"data: [DONE]\n\n"
        finally:
            script.running -= 1

    def _token(self, text: str, reason: str | None) -> bytes:
        part: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        return _event({"choices": [{"index": 0, **part, "finish_reason": reason}], "usage": None})


def _event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": "t", "param": None, "code": None}}, status, headers)


class ScriptedServer:
    """Runs the application in a thread. A context manager."""

    def __init__(self, script: Script) -> None:
        self.script = script
        config = uvicorn.Config(
            build(script), port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        end = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < end
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop; connections that are open are closed."""
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
