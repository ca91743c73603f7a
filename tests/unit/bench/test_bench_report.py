"""Figures of made-up measurements, sweeps, and the picture."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from jackfield.benchmarking.chart import Line, Panel, draw
from jackfield.benchmarking.load import Load, Outcome
from jackfield.benchmarking.measure import Measurement
from jackfield.benchmarking.picture import picture
from jackfield.benchmarking.report import details, serve_report, table_rows
from jackfield.benchmarking.serving import sweep
from jackfield.benchmarking.statistics import Goal
from jackfield.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def good(ttft: float, e2el: float, tokens: int) -> Measurement:
    return Measurement(0.0, 0.0, 0.01, 5.0, ttft, e2el, [0.1], input_tokens=10, output_tokens=tokens)


def outcome() -> Outcome:
    fast, slow = good(0.1, 1.0, 10), good(0.3, 2.3, 5)
    failed = [
        Measurement(0.0, 0.0, 0.0, 1.0, ttft=0.05, error=text) for text in ("HTTP 500: no", "HTTP 500: no", "gone")
    ]
    running = Measurement(0.0, 0.0, 0.0, None, ttft=0.2)
    return Outcome(8, [fast, *failed, slow, running], 4.0, interrupted=True)


def test_every_request_is_counted() -> None:
    report = serve_report(outcome())
    counts = ("completed", "failed", "unfinished", "unsent")
    assert [report[name] for name in counts] == [2, 3, 1, 2]
    assert report["errors"] == [{"error": "HTTP 500: no", "count": 2}, {"error": "gone", "count": 1}]
    assert report["other_errors"] == 0


def test_rates_and_latencies_are_of_requests_that_succeeded() -> None:
    report = serve_report(outcome(), percentiles=(50,))
    expected = {
        "request_throughput": 0.5,
        "input_throughput": 5.0,
        "output_throughput": 3.75,
        "total_token_throughput": 8.75,
        "mean_ttft_ms": 200.0,
        "median_tpot_ms": (100 + 500) / 2,
        "p50_e2el_ms": 1650.0,
        "mean_itl_ms": 100.0,
    }
    assert {name: report[name] for name in expected} == expected
    assert "request_goodput" not in report


@pytest.mark.parametrize(
    ("goals", "reached"),
    [
        ([Goal("ttft", 0.1)], 1),
        ([Goal("ttft", 0.3)], 2),
        ([Goal("ttft", 0.3), Goal("tpot", 0.4)], 1),
        ([Goal("e2el", 0.5)], 0),
    ],
)
def test_goodput_counts_requests_that_reach_all_goals(goals: list[Goal], reached: int) -> None:
    report = serve_report(outcome(), goals)
    assert (report["good_completed"], report["request_goodput"]) == (reached, reached / 4)


def test_an_answer_of_one_token_has_no_time_per_token_and_reaches_it() -> None:
    one = Outcome(1, [good(0.1, 0.1, 1)], 1.0)
    report = serve_report(one, [Goal("tpot", 0.001)])
    assert (report["mean_tpot_ms"], report["good_completed"]) == (None, 1)
    assert ["TPOT (time per output token)", "-", "-", "-", "-"] in table_rows(report, (90,))


def test_many_kinds_of_errors_are_cut_and_counted() -> None:
    failed = [Measurement(0.0, 0.0, ended=1.0, error=f"error {n}") for n in range(13)]
    report = serve_report(Outcome(13, failed, 1.0))
    assert len(report["errors"]) == 10 and report["other_errors"] == 3
    assert report["errors"][0] == {"error": "error 0", "count": 1}


def test_details_tell_of_every_request() -> None:
    found = details(outcome())
    assert [entry["error"] for entry in found] == [None, "HTTP 500: no", "HTTP 500: no", "gone", None, "unfinished"]
    assert (found[0]["tpot"], found[0]["itls"], found[0]["output_tokens"]) == (pytest.approx(0.1), [0.1], 10)


def test_a_sweep_makes_one_load_for_each_number() -> None:
    base = Load(seed=4)
    assert [load.concurrency for load in sweep(base, "1,2,8", "concurrency")] == [1, 2, 8]
    assert [load.rate for load in sweep(Load(concurrency=3), "0.5,2", "rate")] == [0.5, 2.0]
    assert sweep(base, None, "rate") == (base,)


@pytest.mark.parametrize(
    ("load", "values", "by", "field"),
    [
        (Load(concurrency=2), "1,2", "concurrency", "--max-concurrency"),
        (Load(rate=2), "1,2", "rate", "--request-rate"),
        (Load(), "1,,2", "concurrency", "--sweep"),
        (Load(), "1.5", "concurrency", "--sweep"),
        (Load(), "0", "rate", "--sweep"),
    ],
)
def test_sweeps_that_make_no_sense_are_refused(load: Load, values: str, by: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep(load, values, by)
    assert caught.value.field == field


def run(load: int, rate: float, ttft: float | None, tpot: float | None, completed: int = 5) -> dict[str, Any]:
    times = {"ttft": ttft, "tpot": tpot}
    values = {
        f"{kind}_{m}_ms": t and t * (2 if kind == "p99" else 1) for m, t in times.items() for kind in ("median", "p99")
    }
    return {"load": load, "completed": completed, "output_throughput": rate, **values}


def test_the_picture_has_a_point_for_each_run_and_line() -> None:
    runs = [
        run(1, 100.0, 10.0, 5.0),
        run(2, 180.0, 20.0, 6.0),
        run(4, 0.0, None, None, completed=0),
        run(8, 200.0, 80.0, 9.0),
    ]
    root = ET.fromstring(picture('a "b" & <c>', "note", runs, (99.0,)))
    circles = root.findall(f".//{SVG}circle")
    assert len(circles) == 2 * 2 * 3
    hints = [circle.findtext(f"{SVG}title") for circle in circles]
    assert hints[:4] == [
        "median: 10 ms at 100 tokens/s",
        "median: 20 ms at 180 tokens/s",
        "median: 80 ms at 200 tokens/s",
        "p99: 20 ms at 100 tokens/s",
    ]
    texts = [text.text for text in root.findall(f".//{SVG}text")]
    for words in ('a "b" & <c>', "note", "TTFT: time to first token", "TPOT: time per output token", "median", "p99"):
        assert words in texts
    assert texts.count("milliseconds") == texts.count("output tokens per second") == 2
    assert root.get("aria-label") == 'a "b" & <c>'
    assert "prefers-color-scheme: dark" in str(root.findtext(f"{SVG}style"))


def test_points_lie_where_their_axes_say() -> None:
    root = ET.fromstring(
        draw("t", "n", [Panel("p", (Line("l", ((0.0, 0.0), (30.0, 40.0), (15.0, 20.0))),))], ["a", "b", "c"])
    )
    spots = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.findall(f".//{SVG}circle")]
    (x0, y0), (x1, y1), middle = spots
    assert list(middle) == pytest.approx([(x0 + x1) / 2, (y0 + y1) / 2], abs=0.01)
    marks = {text.text: text for text in root.findall(f".//{SVG}text")}
    assert float(marks["40"].get("y", "")) - 4 == pytest.approx(y1), "the mark 40 stands at the height of 40 ms"
    assert float(marks["30"].get("x", "")) == pytest.approx(x1), "the mark 30 stands below 30 tokens/s"
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    assert all(0 < x < width and 0 < y < height for x, y in spots)


@pytest.mark.parametrize("most", [0.0, 0.003, 7.0, 99.0, 100.0, 123456.0])
def test_every_size_of_figure_fits_into_the_picture(most: float) -> None:
    root = ET.fromstring(draw("t", "n", [Panel("p", (Line("l", ((most, most),)),))], ["1"]))
    (circle,) = root.findall(f".//{SVG}circle")
    ends = [(float(line.get("x1", "")), float(line.get("y1", ""))) for line in root.findall(f".//{SVG}line")]
    assert 4 <= len(ends) <= 16
    assert min(x for x, _ in ends) - 0.01 <= float(circle.get("cx", "")) <= max(x for x, _ in ends) + 0.01
    assert min(y for _, y in ends) - 0.01 <= float(circle.get("cy", "")) <= max(y for _, y in ends) + 0.01
    assert not math.isnan(float(circle.get("cy", "")))


def test_a_picture_of_nothing_is_a_picture() -> None:
    root = ET.fromstring(picture("t", "n", [run(1, 0.0, None, None, completed=0)], (99.0,)))
    assert root.findall(f".//{SVG}circle") == []


def test_numbers_and_long_titles_are_written_to_be_read() -> None:
    root = ET.fromstring(draw("t" * 300, "n" * 300, [Panel("p", (Line("l", ((2e6, 0.5),)),))], ["1"]))
    texts = [str(text.text) for text in root.findall(f".//{SVG}text")]
    assert "2,000,000" in texts and "0.5" in texts and not any("e+" in text for text in texts)
    assert texts[:2] == ["t" * 104 + "…", "n" * 139 + "…"]
