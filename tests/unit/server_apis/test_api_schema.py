"""The document that describes the API, tried on the API: requests made from it, right and wrong ones, get answers that
it describes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from api_calls import TOOLS, PoolEngine
from fake_engine import FakeEngine, make_app
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

GENERATING = r"^/(v1/(chat/completions|completions|responses|messages|models)|tokenize|detokenize|health|load|version)"
POOLING = r"^/(v1/embeddings|pooling|classify|score|v1/score|rerank|v1/rerank|v2/rerank)$"
CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance]
PHASES = (Phase.explicit, Phase.generate)


def writer() -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", make_app(FakeEngine("Hello", template=TOOLS)))


def embedder() -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", make_app(PoolEngine()))


def configured(schema: Any, pattern: str, *, each_rule: bool = True) -> Any:
    """Return the routes of a pattern; requests are both right and wrong. ``each_rule``: one for every rule of the
    document and for every way to break it, always the same ones, which are made while tests are collected.
    """
    schema.config.generation.update(modes=list(schemathesis.GenerationMode))
    schema.config.phases.coverage.enabled = each_rule
    return schema.include(path_regex=pattern)


def limited(examples: int) -> Callable[[Any], Any]:
    """Return settings: the same few requests at each run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )


def check(case: Any) -> None:
    answer = case.call()
    if answer.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        assert answer.status_code == 200
        return
    case.validate_response(answer, checks=CHECKS)


WRITER, EMBEDDER = configured(writer(), GENERATING), configured(embedder(), POOLING)
# Requests for each rule are sent by the tests that are not slow.
MANY_WRITER = configured(writer(), GENERATING, each_rule=False)
MANY_EMBEDDER = configured(embedder(), POOLING, each_rule=False)


@WRITER.parametrize()  # type: ignore[untyped-decorator]
@limited(8)
def test_routes_that_generate(case: Any) -> None:
    check(case)


@EMBEDDER.parametrize()  # type: ignore[untyped-decorator]
@limited(8)
def test_routes_that_make_vectors(case: Any) -> None:
    check(case)


@pytest.mark.slow
@MANY_WRITER.parametrize()  # type: ignore[untyped-decorator]
@limited(300)
def test_many_requests_of_routes_that_generate(case: Any) -> None:
    check(case)


@pytest.mark.slow
@MANY_EMBEDDER.parametrize()  # type: ignore[untyped-decorator]
@limited(300)
def test_many_requests_of_routes_that_make_vectors(case: Any) -> None:
    check(case)
