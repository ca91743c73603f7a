"""A browser, real servers, and pages on them.

``PAGE_CHROMIUM`` names the browser, ``PAGE_PICTURES`` a folder for pictures of the page.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "server_operations"))

from page_steps import Opened
from served import KEYS, Served


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("e2e")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    path = os.environ.get("PAGE_CHROMIUM") or shutil.which("chromium")
    assert path, "install Chromium (apt-get install chromium), or let PAGE_CHROMIUM name it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """A server that shows its decisions."""
    served = Served("--expose-decisions")
    try:
        yield served.ready()
    finally:
        served.kill()


@pytest.fixture(scope="session")
def guarded() -> Iterator[Served]:
    """A server that wants a key, under a prefix, and does not show its decisions."""
    served = Served("--api-key", KEYS[0], "--root-path", "/llm")
    try:
        yield served.ready()
    finally:
        served.kill()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Opened]:
    """Return how to open a page in a context of its own. At the end, no page may have met an error of its own, or have
    asked another server.
    """
    contexts: list[BrowserContext] = []
    faults: list[str] = []
    asked: list[tuple[str, str]] = []

    def begin(url: str, path: str = "/", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.extend(t for t in [message.text] if "Security Policy" in t))
        page.on("request", lambda request: asked.append((url, request.url)))
        page.goto(url + path)
        return page

    yield begin
    for context in contexts:
        context.close()
    assert faults == []
    assert [other for url, other in asked if not other.startswith((f"{url}/", "data:"))] == []


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go."""
    named = os.environ.get("PAGE_PICTURES")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
