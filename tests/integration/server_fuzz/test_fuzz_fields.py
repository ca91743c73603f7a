"""Every value of every field is answered: with 200, or with an error in the API's own shape that names the field."""

from __future__ import annotations

import json

import pytest
from fuzz_cases import LONG, LONG_TEXT, MANY_TEXTS, ROUTES, SMALL, Route, large, nested, sent, wrong_field
from fuzz_pair import Pair
from fuzz_raw import Answer, Line

PATHS = [route.path for route in ROUTES]


def url(pair: Pair, route: Route) -> str:
    return (pair.embedder if route.pools else pair.writer).url


def param(route: Route, answer: Answer) -> str | None:
    """Return the field that an error names, whose shape must be that of the route."""
    body = answer.json()
    if route.anthropic:
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        first: str = body["error"]["message"].split(":")[0]
        return first.split(".")[0] if " " not in first else None
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    named: str | None = body["error"]["param"]
    return named.split(".")[0] if named else None


def fault(route: Route, name: str, body: bytes, answer: Answer) -> str | None:
    """Return what is wrong with an answer to a request with a value in a field, or None."""
    shown = f"{name} {body[-80:]!r}: {answer.status} {answer.body[:300]!r}"
    if answer.status == 200:
        return shown if wrong_field(route, body) is not None or b'"error":{' in answer.body else None
    if answer.status not in (400, 404):
        return shown
    named = param(route, answer)
    try:
        expected = wrong_field(route, body)
    except (ValueError, RecursionError):
        return None if named is None else shown
    return None if (named == expected if expected else named in route.model.model_fields) else shown


@pytest.mark.parametrize("route", ROUTES, ids=PATHS)
def test_odd_values(pair: Pair, route: Route) -> None:
    with Line(url(pair, route)) as line:
        sendings = ((name, sent(route, name, value)) for name in route.model.model_fields for value in SMALL)
        faults = [fault(route, name, body, line.post(route.path, body)) for name, body in sendings]
    assert not any(faults), "\n".join(one for one in faults if one)


@pytest.mark.parametrize("route", ROUTES, ids=PATHS)
def test_large_and_deep_values(pair: Pair, route: Route) -> None:
    with Line(url(pair, route)) as line:
        for name in route.model.model_fields:
            for kind, value in large(route, name):
                body = sent(route, name, value)
                answer = line.post(route.path, body)
                assert answer.status in (200, 400, 404), (name, kind, answer.status, answer.body[:300])
                assert len(answer.body) < LONG / 100 or answer.status == 200, (name, kind)
                if answer.status != 200:
                    param(route, answer)


@pytest.mark.parametrize("route", ROUTES, ids=PATHS)
def test_unknown_fields(pair: Pair, route: Route) -> None:
    more = {f"unknown_{number}": number for number in range(10_000)}
    with Line(url(pair, route)) as line:
        answer = line.post(route.path, json.dumps({**route.body, **more}).encode())
        if route.path not in ("/tokenize", "/detokenize", "/classify"):
            assert answer.status == 200 and answer.headers["x-jackfield-ignored"].startswith("unknown_0, unknown_1,")
        assert answer.status in (200, 400) and sum(map(len, answer.headers.values())) < 4096


@pytest.mark.parametrize("route", ROUTES, ids=PATHS)
def test_the_last_of_two_equal_keys_counts(pair: Pair, route: Route) -> None:
    name, value = next(iter(route.body.items()))
    doubled = f'{{"{name}": [[[]]], ' + json.dumps(route.body)[1:]
    turned = json.dumps(route.body)[:-1] + f', "{name}": 5.5}}'
    with Line(url(pair, route)) as line:
        answers = [line.post(route.path, body.encode()) for body in (doubled, turned)]
    if route.path != "/classify":
        assert answers[0].status == 200, (value, answers[0].body)
    assert answers[1].status == 400 and param(route, answers[1]) == name


def test_the_known_large_ones_are_told_what_is_wrong(pair: Pair) -> None:
    chat, text = ROUTES[0], ROUTES[1]
    with Line(pair.writer.url) as line:
        stops = line.post(chat.path, sent(chat, "stop", MANY_TEXTS)).json()["error"]
        prompt = line.post(text.path, sent(text, "prompt", LONG_TEXT)).json()["error"]
        deep = line.post(text.path, sent(text, "prompt", nested("[", "]"))).json()["error"]
    assert (stops["param"], stops["message"]) == ("stop", "stop must be at most 1024 strings")
    assert prompt["param"] == "prompt" and prompt["message"].startswith(f"the prompt has {LONG} characters")
    assert deep["code"] == "invalid_json"
