"""Two real servers on a tiny random model, and requests beside which all the others are sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz_pair import TIMEOUT_S, Pair, Served
from fuzz_raw import Line
from hf import Tiny

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% if documents %}{{ documents | tojson }}\n{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{{ m['tool_call_id'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% if enable_thinking or reasoning_effort %}<t>{% endif %}{% endif %}"
)
CONTEXT = 128
GROWTH_MB = 300.0
"""How much more memory a server may hold after all tests than before them."""
FLAGS = ("--served-model-name", "tiny", "--max-num-seqs", "16", "--max-model-len", str(CONTEXT))
STREAM = json.dumps({"prompt": "beside", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True})


def resident_mb(served: Served) -> float:
    """Return the resident memory of a server and its engine."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (served.process.pid, *served.children)]
    return sum(pages) * 4096 / 1e6


@pytest.fixture(scope="session")
def pair(text_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both servers. After the tests they must be idle, have grown little, have logged no fault and end cleanly."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    more = ("--chat-template", str(template), "--request-timeout-s", str(TIMEOUT_S), "--policy", "priority")
    model = str(text_model.folder)
    made = Pair(Served(*FLAGS, *more, model=model), Served(*FLAGS, "--task", "pool", model=model))
    try:
        for served in made.both:
            served.ready()
        written(made.writer)
        before = [resident_mb(served) for served in made.both]
        yield made
        for served, start in zip(made.both, before, strict=True):
            finish(served, start)
    finally:
        for served in made.both:
            served.kill()


def finish(served: Served, start_mb: float) -> None:
    """End a server, which must have nothing left over."""
    with served.client() as http:
        assert http.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}
    grown = resident_mb(served) - start_mb
    assert grown < GROWTH_MB, f"{grown:.0f} MB"
    served.signal()
    assert served.exit_code() == 0
    assert [line for line in served.lines if " ERROR " in line or "Traceback" in line] == []


def written(served: Served) -> str:
    """Return the text of a stream."""
    with Line(served.url) as line:
        answer = line.post("/v1/completions", STREAM.encode())
    assert answer.status == 200, answer.body
    blocks = answer.body.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], blocks[-3:]
    chunks: list[Any] = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.fixture(autouse=True)
def undisturbed(pair: Pair) -> Iterator[None]:
    """Streams that run during a test say what they say without it."""
    expected, over, found = written(pair.writer), threading.Event(), list[str]()

    def repeat() -> None:
        try:
            while not over.is_set():
                found.append(written(pair.writer))
                over.wait(0.2)
        except Exception as error:
            found.append(repr(error))

    thread = threading.Thread(target=repeat)
    thread.start()
    yield
    over.set()
    thread.join()
    assert found and set(found) == {expected}
