"""What people do on the page, and what the server says about it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, Request, Route, expect
from prometheus_client.parser import text_string_to_metric_families
from served import Served

ANSWER = ".turn.answered"
"""Articles with answers of the model."""
Opened = Callable[..., Page]
"""Opens a page: address of the server, path, options of the browser's context."""
PATIENCE = 20.0


def greedy(page: Page, tokens: int = 24) -> None:
    """Let answers be the same each time."""
    page.fill("#temperature", "0")
    page.fill("#max_tokens", str(tokens))


def ask(page: Page, question: str) -> None:
    """Type a question and send it."""
    page.locator("#question").focus()
    page.keyboard.type(question)
    page.keyboard.press("Enter")


def wait_for_end(page: Page) -> str:
    """Return the text of the last answer when it is over."""
    idle(page)
    return page.locator(f"{ANSWER} .text").last.text_content() or ""


def idle(page: Page) -> None:
    """Wait until nothing is answered."""
    expect(page.locator(".running")).to_have_count(0, timeout=1000 * PATIENCE)


def figures(page: Page) -> str:
    return page.locator(f"{ANSWER} .figures").last.inner_text()


def metric(server: Served, name: str) -> float:
    """Return the sum of a metric over its labels."""
    with server.client() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == f"jackfield:{name}")


def eventually(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def post(server: Served, path: str, **body: Any) -> Any:
    with server.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sent_json(request: Request) -> dict[str, Any]:
    """Return the body of a request that the page made."""
    body: dict[str, Any] = json.loads(request.post_data or "")
    return body


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def say(page: Page, *tokens: str) -> None:
    """Let the page believe that the model answers with these tokens."""
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=_stream(tokens), content_type="text/event-stream")
    )


def refuse(route: Route, status: int, message: str, param: str | None = None) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    route.fulfill(status=status, json={"error": error})


def _stream(tokens: tuple[str, ...]) -> str:
    chunks = []
    for token in tokens:
        one = {"token": token, "bytes": list(token.encode()), "logprob": -0.5}
        logprobs = {"content": [{**one, "top_logprobs": [one]}], "refusal": None}
        chunks.append(
            {"choices": [{"index": 0, "delta": {"content": token}, "logprobs": logprobs, "finish_reason": None}]}
        )
    chunks.append({"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
