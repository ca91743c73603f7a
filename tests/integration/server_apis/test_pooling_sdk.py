"""OpenAI's official client and plain requests ask a real server for vectors; the offline interface has the same."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from hf import Tiny
from idle_server import idle
from openai import AsyncOpenAI, OpenAI
from served import Served

from jackfield import LLM, PoolingParams

TEXTS = ["one", "two and more", "a", "one", "what a long text " * 12]


@pytest.fixture(scope="module")
def offline(text_model: Tiny) -> Iterator[LLM]:
    llm = LLM(str(text_model.folder), task="pool", kv_cache_memory="4MiB", max_model_len=256)
    yield llm
    llm.shutdown()


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found, np.float32), np.array(expected, np.float32), atol=2e-6)


def ask(served: Served, path: str, body: dict[str, Any], status: int = 200) -> Any:
    with served.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_vectors_are_those_of_the_offline_interface_in_their_order(embedding: OpenAI, offline: LLM) -> None:
    expected = [output.data for output in offline.embed(TEXTS)]
    forms: list[dict[str, Any]] = [{}, {"encoding_format": "float"}]  # without a format the client asks for base64
    for form in forms:
        answer = embedding.embeddings.create(model="smol", input=TEXTS, **form)
        assert [item.index for item in answer.data] == list(range(5))
        close([item.embedding for item in answer.data], expected)
        close([answer.data[0].embedding], [answer.data[3].embedding])
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))


def test_k161_base64_equals_floats(embedder: Served) -> None:
    body = {"input": TEXTS[:2]}
    floats = [item["embedding"] for item in ask(embedder, "/v1/embeddings", body)["data"]]
    coded = ask(embedder, "/v1/embeddings", {**body, "encoding_format": "base64"})["data"]
    assert [np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() for item in coded] == floats


def test_token_ids_are_texts(embedding: OpenAI) -> None:
    for text, ids in (("one", [*b"one"]), (["one", "a"], [[*b"one"], [*b"a"]])):
        one, other = (embedding.embeddings.create(model="smol", input=given) for given in (text, ids))
        close([item.embedding for item in one.data], [item.embedding for item in other.data])


def test_k163_dimensions_act_or_are_refused(embedding: OpenAI, offline: LLM) -> None:
    answer = embedding.embeddings.create(model="smol", input="one", dimensions=8)
    close([answer.data[0].embedding], [offline.embed("one", dimensions=8)[0].data])
    with pytest.raises(openai.BadRequestError, match="the model's embeddings have 64 dimensions") as caught:
        embedding.embeddings.create(model="smol", input="one", dimensions=100_000)
    assert caught.value.param == "dimensions"
    plain: Any = embedding.embeddings.create(model="smol", input="one", extra_body={"normalize": False})
    close([plain.data[0].embedding], [offline.embed("one", normalize=False)[0].data])


def test_k165_no_input_makes_numbers_that_are_none(embedding: OpenAI) -> None:
    for given in ([0], " ", "\n\t", [[0], [0]]):
        answer = embedding.embeddings.create(model="smol", input=given)
        assert all(np.isfinite(item.embedding).all() for item in answer.data)
    for empty in ("", ["a", ""]):
        with pytest.raises(openai.BadRequestError, match="the text is empty"):
            embedding.embeddings.create(model="smol", input=empty)


def test_the_asynchronous_client_and_many_texts(embedder: Served) -> None:
    texts = [f"text {number}" for number in range(300)]

    async def vectors() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                client.embeddings.create(model="smol", input=texts),
                client.embeddings.create(model="smol", input=texts[::-1]),
            )
            return [[item.embedding for item in answer.data] for answer in answers]

    one, other = asyncio.run(vectors())
    close(one, other[::-1])


def test_vectors_of_tokens(embedder: Served, offline: LLM) -> None:
    body = {"input": TEXTS[:2], "task": "token_embed", "normalize": False}
    data = ask(embedder, "/pooling", body)["data"]
    expected = offline.encode(TEXTS[:2], PoolingParams(task="token_embed", normalize=False))
    for item, output in zip(data, expected, strict=True):
        assert item["shape"] == list(output.data.shape)
        close(item["data"], output.data)


def test_scores_and_ranks(embedder: Served, offline: LLM) -> None:
    expected = offline.score("one", TEXTS)
    scores = ask(embedder, "/score", {"text_1": "one", "text_2": TEXTS})["data"]
    assert [item["score"] for item in scores] == pytest.approx(expected, abs=2e-6)
    results = ask(embedder, "/v1/rerank", {"query": "one", "documents": TEXTS, "top_n": 3})["results"]
    best = sorted(range(5), key=lambda place: -round(expected[place], 5))[:3]
    assert [result["index"] for result in results] == best
    assert [result["document"]["text"] for result in results] == [TEXTS[place] for place in best]
    assert [result["relevance_score"] for result in results] == pytest.approx(
        [expected[place] for place in best], abs=2e-6
    )


def test_texts_that_do_not_fit(embedding: OpenAI, offline: LLM) -> None:
    long = "x" * 300
    with pytest.raises(openai.BadRequestError, match="the text has 300 tokens, but the context holds 256"):
        embedding.embeddings.create(model="smol", input=long)
    cut = embedding.embeddings.create(model="smol", input=long, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 256
    close([cut.data[0].embedding], [offline.embed("x" * 256)[0].data])


def test_the_model_generates_nothing_and_has_no_labels(embedding: OpenAI, embedder: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="the model makes vectors and generates no text"):
        embedding.chat.completions.create(model="smol", messages=[{"role": "user", "content": "hi"}])
    error = ask(embedder, "/classify", {"input": "a"}, 400)["error"]
    assert (error["param"], error["message"]) == (
        "model",
        "the model has no labels to score; use 'embed' or 'token_embed', or name tokens in returned_token_ids",
    )
    assert idle(embedder.url)


@pytest.mark.model
def test_a_model_that_generates_makes_no_vectors(writing: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the model generates text and makes no vectors"):
        writing.embeddings.create(model="smol", input="one")
