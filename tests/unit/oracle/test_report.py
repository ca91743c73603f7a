"""The report: data, text, differences, log lines."""

from __future__ import annotations

import json
import logging
import platform
from typing import Any

import pytest
from fakes import attention_class, platform_class

from jackfield.config.selection import Selection
from jackfield.errors import ConfigError
from jackfield.interfaces import AttentionRequest, Band, DeviceFacts, PlatformRequest, Preference
from jackfield.oracle import (
    Counterfactual,
    DecisionReport,
    ProposalOutcome,
    decide,
    diff,
    log_decisions,
    request_data,
)
from jackfield.registry import Registry

FIELDS = {"platforms": "platform", "attention_backends": "attention"}


def report(selection: Selection | None = None, **parts: Any) -> DecisionReport:
    registry = Registry()
    registry.register(platform_class("cpu"))
    registry.register(attention_class("rocket", wish=Preference(Band.BEST, "fast here"), requires=("pytest",)))
    registry.register(attention_class("plain", wish=Preference(Band.FALLBACK, "always there")))
    registry.register(attention_class("odd", kinds=frozenset({"mla"})))
    requests = {
        "platforms": PlatformRequest(kind="devices"),
        "attention_backends": AttentionRequest(subject="layers 0-3", kind="full", device=DeviceFacts("cpu")),
    }
    word = (selection or Selection()).resolve()
    decisions = [
        decide(
            registry, family, request, word if family != "platforms" else Selection().resolve(), field=FIELDS[family]
        )
        for family, request in requests.items()
    ]
    return DecisionReport.build(decisions, **parts)


FULL: dict[str, Any] = {
    "proposals": [ProposalOutcome("cache.block_size", 16, False, "page size", "platforms.cpu", False, "user set 8")],
    "notes": ["overlap is off"],
    "counterfactuals": [Counterfactual("cache.block_size", 8, "attention", "rocket", "BEST", "plain")],
}


def test_json_round_trip() -> None:
    made = report(**FULL)
    again = DecisionReport.from_json(made.to_json())
    assert again.to_dict() == made.to_dict()
    assert again.decisions == made.decisions and again.render() == made.render()
    assert json.loads(made.to_json())["schema_version"] == 1


def test_environment_names_owners_and_what_they_require() -> None:
    environment = report().environment
    assert environment["python"] == platform.python_version()
    assert environment["distributions"]["pytest"] == pytest.__version__


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 9}', "the report has schema version 9, this version reads 1"),
        ('{"schema_version": 1}', "this is not a decision report: KeyError: 'decisions'"),
        ("[]", "this is not a decision report: AttributeError: 'list' object has no attribute 'get'"),
        ("no", "this is not a decision report: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_what_is_no_report(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DecisionReport.from_json(text)
    assert caught.value.message == message


def test_summary() -> None:
    assert report().summary() == "cpu · rocket"


def test_summary_words_and_order() -> None:
    data = report().to_dict()
    (attention,) = (entry for entry in data["decisions"] if entry["family"] == "attention_backends")

    def entry(family: str, name: str, component: str = "target") -> dict[str, Any]:
        chosen = {**attention["chosen"], "name": name}
        return {**attention, "family": family, "chosen": chosen, "request": {"component": component}}

    named = [("ops", "b"), ("ops", "torch"), ("ops", "b"), ("models", "Llama"), ("moe_experts", "x"), ("drafters", "n")]
    data["decisions"] = [*(entry(*pair) for pair in named), entry("attention_backends", "y", "drafter")]
    assert DecisionReport.from_dict(data).summary() == "Llama · experts x · ops b+torch · drafter n"


def test_text_has_every_candidate_reason_and_note() -> None:
    text = report(**FULL).render(width=160)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "cpu · rocket"
    assert "* rocket (in process) BEST fast here" in lines
    assert "+ plain (in process) FALLBACK always there" in lines
    assert "- odd (in process) rejected: kind kind: 'full' is not among 'mla'" in lines
    assert "counterfactual: cache.block_size = 8 excluded rocket (BEST)" in lines
    assert "note: overlap is off" in lines
    assert (
        "proposal: platforms.cpu proposes cache.block_size = 16 (should): page size; not applied: user set 8" in lines
    )
    assert max(map(len, text.splitlines())) <= 160


def test_colour_only_when_asked() -> None:
    assert "\x1b[" not in report().render() and "\x1b[" in report().render(color=True)


def test_differences() -> None:
    first, second = report(), report(Selection(force="plain", exclude=("odd",)), **FULL)
    at = "attention_backends for target, layers 0-3 (full)"
    assert diff(first, first) == []
    assert diff(first, second) == [
        f"{at}: rocket ((in process), BEST) -> plain ((in process), FALLBACK)",
        f"{at}: auto -> forced",
        f"{at}: candidate odd ((in process)): rejected (kind) -> rejected (excluded)",
        "proposal cache.block_size: none -> 16 (not applied)",
        "note only in the second: overlap is off",
        "counterfactual only in the second: cache.block_size = 8 excluded rocket (BEST)",
        f"environment: pytest {pytest.__version__} -> none",
    ]


def test_differences_of_what_was_decided_at_all() -> None:
    full = report()
    part = DecisionReport(full.decisions[:1], environment=full.environment)
    at = "attention_backends for target, layers 0-3 (full)"
    assert diff(full, part) == [f"{at}: rocket ((in process), BEST) -> not decided"]
    assert diff(part, full) == [f"{at}: not decided -> rocket ((in process), BEST)"]


def test_one_log_line_for_each_decision(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jackfield.oracle"):
        log_decisions(report())
    assert [record.getMessage() for record in caplog.records] == [
        "platforms for target (devices): cpu ((in process)), SUPPORTED, auto: no reason given",
        "attention_backends for target, layers 0-3 (full): rocket ((in process)), BEST, auto: fast here",
    ]


def test_request_as_data() -> None:
    request = AttentionRequest(
        needs=frozenset({"b", "a"}), layers=(1, 2), extra={"x": Band.BEST}, device=DeviceFacts("cpu")
    )
    data = request_data(request)
    assert (data["needs"], data["layers"], data["extra"]) == (["a", "b"], [1, 2], {"x": "BEST"})
    assert data["device"]["type"] == "cpu" and data["rank"] == {"rank": 0, "size": 1}
    assert json.loads(json.dumps(data)) == data
