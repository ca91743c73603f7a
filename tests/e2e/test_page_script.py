"""Parts of the page's script that compute something, against other ways to compute it."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Browser
from prometheus_client.parser import text_string_to_metric_families

from jackfield.metrics import EngineMetrics, Histogram
from jackfield.metrics.histogram import SECONDS
from jackfield.server.operations.prometheus import ServerMetrics
from jackfield.server.page.document import read_static


def run(browser: Browser, files: tuple[str, ...], code: str, argument: Any = None) -> Any:
    """Return what code returns that stands behind some of the page's files."""
    page = browser.new_page()
    try:
        source = "\n".join(read_static(name) for name in files)
        return page.evaluate(f"(given) => {{ {source}\n{code} }}", argument)
    finally:
        page.close()


def exposition(times: list[float], model: str = 'a "b",le="1"}', **values: Any) -> str:
    histogram = Histogram(SECONDS)
    for time in times:
        histogram.observe(time)
    histograms = {**EngineMetrics().histograms, "time_to_first_token_seconds": histogram.data()}
    engine = EngineMetrics(histograms=histograms, **values)
    return ServerMetrics(lambda: engine, model).text()[0].decode()


def test_metrics_are_read_as_prometheus_reads_them(browser: Browser) -> None:
    text = exposition(
        [0.02, 0.3], finished={"stop": 3, "length": 4}, running=7, cache_usage=0.25, generation_tokens=10**9
    )
    code = "const { values } = parseMetrics(given); return Object.fromEntries(values);"
    found = run(browser, ("metrics.js",), code, text)
    expected: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("jackfield:")
            if name != sample.name and not name.endswith("_bucket"):
                expected[name] = expected.get(name, 0) + sample.value
    assert found == expected and found["request_success_total"] == 7


def test_rates_are_of_the_time_between_two_readings(browser: Browser) -> None:
    before = exposition([], generation_tokens=100, prefix_queries=50, prefix_hits=10, preemptions=1)
    now = exposition([], generation_tokens=180, prefix_queries=90, prefix_hits=40, preemptions=3, cache_usage=0.5)
    code = "return reading({at: 1000, ...parseMetrics(given[0])}, {at: 3000, ...parseMetrics(given[1])});"
    found = run(browser, ("metrics.js",), code, [before, now])
    expected = {"at": 3000, "running": 0, "waiting": 0, "cache": 50, "tokens": 40, "prefix": 75, "preemptions": 2}
    assert found == {**expected, "gap": None}


@pytest.mark.parametrize("part", [0.5, 0.9, 0.99])
def test_percentiles_are_of_what_came_in_between(browser: Browser, part: float) -> None:
    old, new = [0.001] * 50, [0.03 + 0.0005 * n for n in range(100)]
    code = "return percentile(parseMetrics(given[0]), parseMetrics(given[1]), given[2], given[3]);"
    name = "time_to_first_token_seconds"
    found = run(browser, ("metrics.js",), code, [exposition(old), exposition(old + new), name, part])
    exact = sorted(new)[int(part * len(new)) - 1]
    low = max(bound for bound in SECONDS if bound < exact)
    assert low <= found <= next(bound for bound in SECONDS if bound >= exact)
    assert found == pytest.approx(exact, rel=0.35)
    assert run(browser, ("metrics.js",), code, [exposition(old), exposition(old), name, part]) is None


def pieces(browser: Browser, chunks: list[tuple[str, list[Any]]]) -> list[tuple[str, int]]:
    """Return text and number of tokens of each piece. Tokens are bytes, text (of a completion), or None."""
    given = [
        [
            text,
            [
                {"text": t} if isinstance(t, str) else {"text": "?", "bytes": None if t is None else list(t)}
                for t in tokens
            ],
        ]
        for text, tokens in chunks
    ]
    code = """const aligner = new Aligner(), found = [];
      for (const [text, tokens] of given) found.push(...aligner.push(text, tokens));
      return [...found, ...aligner.finish()].map(({ text, tokens }) => [text, tokens.length]);"""
    return [(text, count) for text, count in run(browser, ("tokens.js",), code, given)]


CASES: dict[str, tuple[list[tuple[str, list[Any]]], list[tuple[str, int]]]] = {
    "one by one": ([("a", [b"a"]), (" b", [b" b"])], [("a", 1), (" b", 1)]),
    "a character of three tokens": ([("", [b"\xe2"]), ("", [b"\x82"]), ("€", [b"\xac"])], [("€", 3)]),
    "text held back": ([("", [b"ab"]), ("abc", [b"c"])], [("ab", 1), ("c", 1)]),
    "half of a token held back": ([("a", [b"abc"]), ("bcd", [b"d"])], [("abc", 1), ("d", 1)]),
    "cut inside a token by a stop string": ([("a", [b"a"]), (" w", [b" world"])], [("a", 1), (" w", 1)]),
    "a token that is no text": ([("a", [b"a", None]), ("b", [b"b"])], [("a", 1), ("b", 2)]),
    "a space that the text does not have": ([("Hi", [b" Hi"]), (" you", [b" you"])], [("Hi", 1), (" you", 1)]),
    "texts of a completion": ([("ä b", ["ä", " b"])], [("ä", 1), (" b", 1)]),
    "no probabilities": ([("a b", []), ("c", [])], [("a b", 0), ("c", 0)]),
    "tokens that do not fit": ([("xyz", [b"q"]), ("d", [b"d"])], [("xyz", 0), ("d", 1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_text_are_brought_together(browser: Browser, name: str) -> None:
    chunks, expected = CASES[name]
    found = pieces(browser, chunks)
    assert found == expected
    assert "".join(text for text, _ in found) == "".join(text for text, _ in chunks)
