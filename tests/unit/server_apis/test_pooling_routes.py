"""Routes of engines that make vectors: shapes, order, bounds; and which routes which engine has."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from api_calls import CHAT, COUNT, HI, MESSAGES, RESPONSES, PoolEngine, message, run
from fake_engine import FakeEngine, post
from test_server_disconnect import Connection, until

from jackfield.server.pooling.types import Embeddings, Labels, PooledList, Ranking, Scores

EMBED = "/v1/embeddings"


def vectors(body: dict[str, Any]) -> list[Any]:
    return [item["embedding"] for item in body["data"]]


@pytest.mark.parametrize(
    ("given", "count"), [("ab", 1), (["ab", "c"], 2), ([97, 98], 1), ([[97, 98], [99]], 2)], ids=str
)
def test_embeddings_of_every_kind_of_input_keep_their_order(given: Any, count: int) -> None:
    engine = PoolEngine(together=count)
    body = post(engine, EMBED, {"input": given, "user": "me"}).json()
    Embeddings.model_validate(body, strict=True)
    assert vectors(body) == [[97, 2, 1], [99, 1, 1]][:count]
    assert [item["index"] for item in body["data"]] == list(range(count))
    tokens = {1: 2, 2: 3}[count]
    assert (body["object"], body["usage"]) == ("list", {"prompt_tokens": tokens, "total_tokens": tokens})


def test_k161_base64_holds_little_endian_floats_of_32_bits() -> None:
    given = {"input": ["ab", "c"]}
    floats = vectors(post(PoolEngine(), EMBED, given).json())
    coded = vectors(post(PoolEngine(), EMBED, {**given, "encoding_format": "base64"}).json())
    assert [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in coded] == floats


def test_parameters_reach_the_engine() -> None:
    engine = PoolEngine(policy="priority")
    fields = {"dimensions": 2, "normalize": False, "priority": 3, "novelty": 1}
    answer = post(engine, EMBED, {"input": "ab", **fields}, policy="priority")
    assert answer.headers["x-jackfield-ignored"] == "novelty"
    params = engine.pooling[0]
    assert (params.task, params.dimensions, params.normalize, engine.priorities) == ("embed", 2, False, [3])


@pytest.mark.parametrize(("keep", "kept"), [(2, b"ab"), (-1, b"a" + b"b" * 255), (None, None)])
def test_texts_are_cut_where_the_request_says_so(keep: int | None, kept: bytes | None) -> None:
    for given in ("a" + "b" * 299, [97, *[98] * 299]):
        engine = PoolEngine()
        answer = post(engine, EMBED, {"input": given, "truncate_prompt_tokens": keep})
        if kept is None:
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "input")
            assert error["message"].startswith("the text has 300 tokens, but the context holds 256")
        else:
            assert engine.prompts == [list(kept)]


def test_pooling_for_tokens_and_for_texts() -> None:
    body = post(PoolEngine(), "/pooling", {"input": ["ab", "c"], "task": "token_embed"}).json()
    PooledList.model_validate(body, strict=True)
    assert [(item["shape"], item["data"]) for item in body["data"]] == [
        ([2, 2], [[97, 0.5], [98, 0.5]]),
        ([1, 2], [[99, 0.5]]),
    ]
    coded = post(PoolEngine(), "/pooling", {"input": "ab", "task": "token_embed", "encoding_format": "base64"}).json()
    [item] = coded["data"]
    numbers = np.frombuffer(base64.b64decode(item["data"]), "<f4").reshape(item["shape"])
    assert numbers.tolist() == [[97, 0.5], [98, 0.5]]
    assert post(PoolEngine(), "/pooling", {"input": "ab"}).json()["data"][0]["data"] == [97, 2, 1]


def test_labels() -> None:
    engine = PoolEngine()
    body = post(engine, "/classify", {"input": ["ab"], "activation": False}).json()
    Labels.model_validate(body, strict=True)
    assert body["data"] == [{"object": "classification", "index": 0, "label": 0, "probs": [97, 2, 1], "num_classes": 3}]
    assert (engine.pooling[0].task, engine.pooling[0].activation) == ("classify", False)


def cosine(left: list[int], right: list[int]) -> float:
    return float(np.dot(left, right) / np.linalg.norm(left) / np.linalg.norm(right))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores_are_cosines_pair_by_pair(path: str, names: tuple[str, str]) -> None:
    one, two, three = [97, 1, 1], [98, 2, 1], [99, 3, 1]
    body = post(PoolEngine(together=3), path, {names[0]: "a", names[1]: ["bb", "ccc"]}).json()
    Scores.model_validate(body, strict=True)
    expected = [cosine(one, two), cosine(one, three)]
    assert [item["score"] for item in body["data"]] == pytest.approx(expected, abs=1e-6)
    assert body["usage"]["total_tokens"] == 6
    body = post(PoolEngine(), path, {names[0]: ["a", "bb"], names[1]: ["bb", "ccc"]}).json()
    expected = [cosine(one, two), cosine(two, three)]
    assert [item["score"] for item in body["data"]] == pytest.approx(expected, abs=1e-6)


DOCUMENTS = ["zzzzzzzz" * 20, "a", {"text": "bb"}, "a"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered_best_first(path: str) -> None:
    body = post(PoolEngine(together=5), path, {"query": "a", "documents": DOCUMENTS}).json()
    Ranking.model_validate(body, strict=True)
    assert [result["index"] for result in body["results"]] == [1, 3, 2, 0]
    assert body["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6)
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == sorted(scores, reverse=True)
    texts = [result.get("document") for result in body["results"]]
    second = path == "/v2/rerank"
    assert texts[2] == (None if second else {"text": "bb"}) and ("meta" in body) == second
    top = post(
        PoolEngine(), path, {"query": "a", "documents": DOCUMENTS, "top_n": 2, "return_documents": second}
    ).json()
    assert [result["index"] for result in top["results"]] == [1, 3]
    assert ("document" in top["results"][0]) == second
    more = post(PoolEngine(), path, {"query": "a", "documents": DOCUMENTS, "top_n": 100}).json()
    assert len(more["results"]) == 4


def test_documents_alone_are_cut() -> None:
    engine = PoolEngine()
    post(engine, "/rerank", {"query": "abc", "documents": ["defg"], "max_tokens_per_doc": 2})
    assert engine.prompts == [[*b"abc"], [*b"de"]]


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (EMBED, {"input": ""}, "input", "the text is empty"),
    (EMBED, {"input": ["a", ""]}, "input.1", "the text is empty"),
    (EMBED, {"input": []}, "input", "input: must be a text, a list of token ids"),
    (EMBED, {"input": ["a"] * 2049}, "input", "input: must be a text, a list of token ids, or a list of 1 to 2048"),
    (EMBED, {"input": [999]}, "input", "the prompt has token ids outside the vocabulary"),
    (EMBED, {"input": "a", "dimensions": 0}, "dimensions", "dimensions: input should be greater than or equal to 1"),
    (EMBED, {"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format: input should be 'float'"),
    (EMBED, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "a prompt cannot be cut to nothing"),
    (EMBED, {"input": "a", "messages": HI}, "messages", "messages: conversations are not embedded"),
    (EMBED, {"input": "a", "model": "x"}, "model", "the model 'x' is not served here"),
    (EMBED, {"input": "a", "priority": 1}, "priority", "the server's scheduling policy"),
    ("/pooling", {"input": "a", "task": "score"}, "task", "task: input should be 'embed', 'classify'"),
    ("/pooling", {"input": "a", "task": "classify", "dimensions": 2}, "dimensions", "dimensions must be"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "2 texts cannot be paired with 3"),
    ("/score", {"text_1": "a"}, "text_2", "give either text_2 or documents"),
    ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1", "give either text_1 or queries"),
    ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2.1", "the text is empty"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "documents: must be a list of 1 to 2048 texts"),
    ("/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents.0", "a document is a text, or an object"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query", "the text is empty"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "top_n: input should be greater than or"),
]


@pytest.mark.parametrize(("path", "body", "param", "text"), BAD)
def test_what_cannot_be_honoured_is_named(path: str, body: dict[str, Any], param: str, text: str) -> None:
    engine = PoolEngine()
    response = post(engine, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert error["message"].startswith(text)


def test_k165_numbers_that_are_not_finite_are_an_error_and_no_answer() -> None:
    engine = PoolEngine()
    engine.vocab_size = 2**31
    odd = np.float32("nan")

    async def encode(*args: Any, **options: Any) -> Any:
        output = await PoolEngine.encode(engine, *args, **options)
        output.data[0] = odd
        return output

    engine.encode = encode  # type: ignore[method-assign]
    response = post(engine, EMBED, {"input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


POOLING = [
    (EMBED, {"input": "a"}),
    ("/pooling", {"input": "a"}),
    ("/classify", {"input": "a"}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/score", {}),
    ("/rerank", {"query": "a", "documents": ["a"]}),
    ("/v1/rerank", {}),
    ("/v2/rerank", {}),
]
GENERATING = [
    (CHAT, {"messages": HI}),
    ("/v1/completions", {"prompt": "a"}),
    (MESSAGES, message()),
    (COUNT, {"messages": HI}),
    (RESPONSES, {"input": "a"}),
]


@pytest.mark.parametrize(("path", "body"), POOLING)
def test_an_engine_that_generates_makes_no_vectors(path: str, body: dict[str, Any]) -> None:
    response = post(FakeEngine(), path, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "the model generates text and makes no vectors; start a server with --task pool"
    )


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_an_engine_that_makes_vectors_generates_nothing(path: str, body: dict[str, Any]) -> None:
    response = post(PoolEngine(), path, body)
    assert response.status_code == 400
    assert "the model makes vectors and generates no text" in response.json()["error"]["message"]


@pytest.mark.parametrize("cancelled", [False, True])
def test_u245_a_client_that_leaves_frees_everything(cancelled: bool) -> None:
    async def test() -> None:
        engine = PoolEngine(together=4)
        connection = Connection(engine, EMBED, {"input": ["a", "b", "c"]})
        task = asyncio.create_task(connection.run())
        await until(lambda: len(engine.living) == 3)
        if cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            connection.left.set()
            await task
        await until(lambda: not engine.living)
        assert engine.ended == 3

    run(test)


def test_one_wrong_text_ends_the_others() -> None:
    async def test() -> None:
        engine = PoolEngine(together=4)
        connection = Connection(engine, EMBED, {"input": [[97], [98], [999]]})
        await connection.run()
        assert connection.sent[0]["status"] == 400
        await until(lambda: not engine.living)

    run(test)
