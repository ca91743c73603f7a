"""The page is one document, safe to open, and readable."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import zipfile
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import httpx2
import pytest
from fake_engine import FakeEngine, client, get, post, say
from hatchling.builders.wheel import WheelBuilder

from jackfield.server.app import build_app
from jackfield.server.page.document import FRAME, SCRIPTS, STYLES, document, read_static

ROOT = Path(__file__).parents[3]
STATIC = "jackfield/server/page/static"
PAGE = document().body.decode()


class Elements(HTMLParser):
    """Collects tags with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def parsed() -> Elements:
    elements = Elements()
    elements.feed(PAGE)
    return elements


def blocks(tag: str) -> list[str]:
    return re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", PAGE, re.DOTALL)


def policy(response: httpx2.Response) -> dict[str, str]:
    rules = response.headers["content-security-policy"].split("; ")
    return {name: value for name, _, value in (rule.partition(" ") for rule in rules)}


def test_the_page_is_answered_as_html_that_is_checked_again_each_time() -> None:
    answer = get(FakeEngine(), "/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (answer.headers["cache-control"], answer.headers["x-content-type-options"]) == ("no-cache", "nosniff")
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.content == document().body


@pytest.mark.parametrize(("tag", "status"), [("{}", 304), ("W/{}", 304), ('"old", {}', 304), ('"old"', 200), ("", 200)])
def test_a_page_that_the_browser_has_is_not_sent_again(tag: str, status: int) -> None:
    async def ask() -> httpx2.Response:
        async with client(FakeEngine()) as http:
            return await http.get("/", headers={"if-none-match": tag.format(document().etag)})

    answer = asyncio.run(ask())
    assert (answer.status_code, bool(answer.content)) == (status, status == 200)
    assert answer.headers["etag"] == document().etag
    assert "content-security-policy" in answer.headers


def test_head_is_answered_and_other_methods_are_not() -> None:
    async def ask(method: str) -> httpx2.Response:
        async with client(FakeEngine()) as http:
            return await http.request(method, "/")

    assert [asyncio.run(ask(method)).status_code for method in ("HEAD", "POST", "DELETE")] == [200, 405, 405]


def test_the_policy_allows_this_style_and_this_script_only() -> None:
    rules = policy(get(FakeEngine(), "/"))
    for tag in ("style", "script"):
        (text,) = blocks(tag)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert set(rules) == {
        *("default-src", "script-src", "style-src", "img-src", "connect-src", "base-uri", "form-action"),
        *("frame-ancestors", "require-trusted-types-for", "trusted-types"),
    }


def test_nothing_is_loaded_from_anywhere() -> None:
    allowed = "http://www.w3.org/2000/svg"
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", PAGE.replace(allowed, "")) == []
    assert re.findall(r"@import|url\(|@font-face", PAGE) == []
    loading = [(tag, a) for tag, a in parsed().tags if {"src", "srcset", "href", "action", "data"} & a.keys()]
    assert [tag for tag, _ in loading] == ["link"] and str(loading[0][1]["href"]).startswith("data:image/svg+xml,")


def test_no_attribute_is_code_or_style() -> None:
    tags = parsed().tags
    assert [(tag, name) for tag, a in tags for name in a if name.startswith("on") or name == "style"] == []
    assert [tag for tag, _ in tags].count("script") == [tag for tag, _ in tags].count("style") == 1


def test_the_script_never_makes_html_of_text() -> None:
    script = "\n".join(read_static(name) for name in SCRIPTS)
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|createContextualFragment"
    assert re.findall(ways, script) == []
    assert "localStorage.setItem(THEME" in script and script.count("localStorage.setItem") == 1
    assert script.count("sessionStorage.setItem") == 1


def test_every_file_is_used_and_short() -> None:
    folder = resources.files("jackfield.server.page") / "static"
    names = {entry.name for entry in folder.iterdir()}
    assert names == {FRAME, *STYLES, *SCRIPTS}
    assert {name: count for name in names if (count := read_static(name).count("\n")) > 300} == {}
    assert all(read_static(name).strip() in PAGE for name in (*STYLES, *SCRIPTS))
    assert "/* styles */" not in PAGE and "/* scripts */" not in PAGE


def test_ids_are_unique_and_what_refers_to_them_finds_them() -> None:
    attributes = [a for _, a in parsed().tags]
    ids = [str(a["id"]) for a in attributes if "id" in a]
    assert sorted(set(ids)) == sorted(ids)
    references = ("for", "aria-controls", "aria-labelledby", "aria-describedby")
    named = {str(a[name]) for a in attributes for name in references if name in a}
    script = "\n".join(read_static(name) for name in SCRIPTS)
    named |= set(re.findall(r'(?:byId|say)\("([\w-]+)"', script))
    numbers = set(re.findall(r'name: "(\w+)", label', script))
    assert named - numbers - set(ids) == set()


def test_the_page_is_no_part_of_the_described_interface() -> None:
    engine = FakeEngine()
    assert "/" not in build_app(engine, engine.config).openapi()["paths"]


def test_the_page_knows_the_servers_words_for_a_model_without_a_chat_template() -> None:
    (words,) = re.findall(r'NO_TEMPLATE = "([^"]+)"', read_static("playground.js"))
    error = post(FakeEngine(template=None), "/v1/chat/completions", say()).json()["error"]
    assert words in error["message"]


def test_the_wheel_holds_the_files(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if name.startswith(STATIC)}
    assert held == {f"{STATIC}/{name}": read_static(name).encode() for name in (FRAME, *STYLES, *SCRIPTS)}
