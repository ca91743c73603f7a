"""Routes of engines that score two texts read together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from api_calls import PoolEngine
from fake_engine import post

from jackfield.engine.outputs import PoolingOutput
from jackfield.tokenizer import Tokenizer


class Bytes(Tokenizer):
    """Reads pairs: 1 between two texts of bytes, 2 behind them."""

    def encode_pair(
        self,
        text: str,
        pair: str,
        add_special_tokens: bool = True,
        *,
        keep: int | None = None,
        keep_pair: int | None = None,
    ) -> tuple[list[int], list[int]]:
        first, second = [*text.encode(), *([1] if add_special_tokens else [])], [*pair.encode()[:keep_pair], 2]
        types = [0] * len(first) + [1] * len(second)
        return (first + second)[:keep], types[:keep]


class Cross(PoolEngine):
    """Scores a pair by its number of tokens of the second type."""

    labels = 1

    def __init__(self, types: int = 2) -> None:
        super().__init__()
        self.tokenizer = Bytes(self.tokenizer.hf)
        self.token_types = types
        self.given: list[dict[str, Any]] = []

    async def encode(self, prompt: Any, pooling_params: Any = None, request_id: str = "", *, priority: int = 0) -> Any:
        self.given.append(prompt)
        self.pooling.append(pooling_params)
        score = np.array([sum(prompt.get("token_type_ids", [0]))], np.float32)
        return PoolingOutput(request_id, prompt["prompt_token_ids"], score)


@pytest.mark.parametrize("left", ["ab", ["ab", "ab"]])
def test_scores_are_the_models(left: Any) -> None:
    engine = Cross()
    body = post(engine, "/score", {"text_1": left, "text_2": ["c", "def"]}).json()
    assert [item["score"] for item in body["data"]] == [2, 4]
    assert [one["prompt_token_ids"] for one in engine.given] == [[97, 98, 1, 99, 2], [97, 98, 1, 100, 101, 102, 2]]
    assert engine.given[0]["token_type_ids"] == [0, 0, 0, 1, 1]
    assert body["usage"]["total_tokens"] == 12
    assert {(params.task, params.activation) for params in engine.pooling} == {("classify", True)}


def test_models_without_types_get_none() -> None:
    engine = Cross(types=0)
    post(engine, "/score", {"text_1": "a", "text_2": "b"})
    assert engine.given == [{"prompt_token_ids": [97, 1, 98, 2], "cache_salt": ""}]


def test_documents_are_ordered_by_the_models_scores() -> None:
    engine = Cross()
    body = post(engine, "/rerank", {"query": "q", "documents": ["a", "bbb", {"text": "cc"}]}).json()
    assert [(one["index"], one["relevance_score"]) for one in body["results"]] == [(1, 4), (2, 3), (0, 2)]


def test_pairs_are_cut() -> None:
    engine = Cross()
    cut = {"max_tokens_per_doc": 2, "truncate_prompt_tokens": -1, "add_special_tokens": False}
    post(engine, "/rerank", {"query": "q", "documents": ["abcd"], **cut})
    post(engine, "/score", {"text_1": "q", "text_2": "abcd", "truncate_prompt_tokens": 3})
    assert [one["prompt_token_ids"] for one in engine.given] == [[113, 97, 98, 2], [113, 1, 97]]


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/score", {"text_1": "", "text_2": ["a"]}, "text_1.0", "the text is empty"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2.1", "the text is empty"),
        ("/rerank", {"query": "a", "documents": ["b", "c" * 254]}, "documents.1", "the text has 257 tokens"),
    ],
)
def test_pairs_that_do_not_fit_are_named(path: str, body: dict[str, Any], param: str, text: str) -> None:
    response = post(Cross(), path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(text)
