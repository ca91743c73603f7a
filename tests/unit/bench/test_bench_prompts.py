"""Random prompts and prompts from files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jackfield.benchmarking.datasets import Dataset
from jackfield.benchmarking.prompts import WORDS, RandomShape, Sample, Vocabulary, random_samples, vocabulary
from jackfield.benchmarking.requests import RequestPlan
from jackfield.errors import ConfigError

IDS = Vocabulary(tuple(range(100, 200)), 1.0)


async def no_tokenizer(text: str) -> None:
    return None


async def words_as_tokens(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def samples(dataset: Dataset, tokenize: Any = no_tokenizer, **more: Any) -> list[Sample]:
    return asyncio.run(dataset.samples(tokenize, **more))


def token_lists(found: list[Sample]) -> list[list[int]]:
    lists = [sample.prompt for sample in found if isinstance(sample.prompt, list)]
    assert len(lists) == len(found)
    return lists


def test_random_prompts_are_ids_of_the_vocabulary_with_a_shared_beginning() -> None:
    shape = RandomShape(input_len=20, output_len=10, range_ratio=0.5, prefix_len=7)
    found = random_samples(shape, IDS, 400, seed=3)
    prompts = token_lists(found)
    assert {tuple(prompt[:7]) for prompt in prompts} == {tuple(prompts[0][:7])}
    assert len({tuple(prompt) for prompt in prompts}) == 400
    assert {len(prompt) - 7 for prompt in prompts} == set(range(10, 31))
    assert {sample.output_len for sample in found} == set(range(5, 16))
    assert {token for prompt in prompts for token in prompt} <= set(IDS.ids)


def test_random_prompts_repeat_with_their_seed() -> None:
    shape = RandomShape(input_len=20, output_len=10)
    assert random_samples(shape, IDS, 5, seed=3) == random_samples(shape, IDS, 5, seed=3)
    assert random_samples(shape, IDS, 5, seed=3) != random_samples(shape, IDS, 5, seed=4)


def test_each_run_has_prompts_of_its_own_behind_the_same_beginning() -> None:
    data = Dataset(num_prompts=50, input_len=9, prefix_len=4)
    first, second = map(token_lists, asyncio.run(data.turns(words_as_tokens, 2)))
    assert {tuple(prompt[:4]) for prompt in first + second} == {tuple(first[0][:4])}
    assert not {tuple(prompt) for prompt in first} & {tuple(prompt) for prompt in second}


def test_random_texts_allow_for_words_of_several_tokens() -> None:
    words = vocabulary([1] * (2 * len(WORDS)))
    assert words.tokens_per_word == 2.0
    (sample,) = random_samples(RandomShape(input_len=40, output_len=1, prefix_len=10), words, 1, seed=0, text=True)
    assert isinstance(sample.prompt, str)
    assert len(sample.prompt.split()) == 20 + 5 and set(sample.prompt.split()) <= set(WORDS)


def test_a_tokenizer_that_can_be_asked_gives_ids_and_none_gives_text() -> None:
    data = Dataset(num_prompts=2, input_len=5)
    assert all(set(prompt) <= set(map(len, WORDS)) for prompt in token_lists(samples(data, words_as_tokens)))
    assert all(isinstance(sample.prompt, str) and len(sample.prompt.split()) == 5 for sample in samples(data))
    assert all(isinstance(sample.prompt, str) for sample in samples(data, words_as_tokens, text=True))
    assert len(samples(Dataset())) == 100


def test_all_lengths_that_are_wrong_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        RandomShape(input_len=0, output_len=1, range_ratio=1.0, prefix_len=-1)
    for flag in ("--input-len", "--range-ratio", "--prefix-len"):
        assert f"{flag} must be" in caught.value.message
    assert "--output-len" not in caught.value.message


@pytest.mark.parametrize(
    ("settings", "field", "text"),
    [
        ({"name": "randm"}, "--dataset", "did you mean 'random'?"),
        ({"name": "news"}, "--dataset", "data sets are random, sharegpt, prompts"),
        ({"name": "prompts"}, "--dataset-path", "read from a file"),
        ({"path": Path("x")}, "--dataset", "--dataset-path has no meaning for the data set 'random'"),
        (
            {"name": "sharegpt", "path": Path("x"), "input_len": 3, "prefix_len": 1},
            "--dataset",
            "--input-len, --prefix-len has",
        ),
        ({"num_prompts": 0}, "--num-prompts", "must be at least 1"),
        ({"seed": -1}, "--seed", "must be at least 0"),
        ({"output_len": 0}, "--output-len", "must be at least 1"),
    ],
)
def test_flags_that_do_not_fit_the_data_set_are_refused(settings: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Dataset(**settings)
    assert caught.value.field == field and text in str(caught.value)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_lines_of_prompts(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "b"}]
    file = write(tmp_path / "p", {"prompt": "a", "max_tokens": 3}, "", {"messages": talk}, {"prompt": [1, 2]})
    expected = [Sample("a", None, 3), Sample(None, talk, None), Sample([1, 2], None, None)]
    assert samples(Dataset(name="prompts", path=file)) == expected
    assert samples(Dataset(name="prompts", path=file, num_prompts=2)) == expected[:2]
    assert {s.output_len for s in samples(Dataset(name="prompts", path=file, output_len=9))} == {9}


def test_all_wrong_lines_are_named(tmp_path: Path) -> None:
    file = write(
        tmp_path / "p", {"prompt": "a"}, "{", [1], {"prompt": "", "seed": 1}, {"messages": []}, {"max_tokens": 0}
    )
    with pytest.raises(ConfigError) as caught:
        samples(Dataset(name="prompts", path=file))
    message = caught.value.message
    assert "line 1" not in message
    for text in (
        "line 2: no JSON: ",
        "line 3: no JSON object",
        "line 4: unknown field 'seed', prompt is neither a text nor a list of token ids",
        "line 5: messages is no list of objects",
        "line 6: either prompt or messages is needed, max_tokens is no positive number",
    ):
        assert text in message


def test_a_file_with_too_few_prompts_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "p", {"prompt": "a"})
    with pytest.raises(ConfigError) as caught:
        samples(Dataset(name="prompts", path=file, num_prompts=2))
    assert "it holds 1 prompts, fewer than 2" in caught.value.message
    assert caught.value.remedy == "write --num-prompts 1"
    with pytest.raises(ConfigError, match="it cannot be read: "):
        samples(Dataset(name="prompts", path=tmp_path / "absent"))
    with pytest.raises(ConfigError, match="it holds no prompt"):
        samples(Dataset(name="prompts", path=write(tmp_path / "q", "")))


def conversation(*turns: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


def test_conversations_of_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    pairs = {f"question {n}": "word " * n for n in range(1, 9)}
    file.write_text(json.dumps([conversation("alone"), *(conversation(q, a, "more") for q, a in pairs.items())]))
    data = Dataset(name="sharegpt", path=file, seed=1)
    exact, rough = samples(data, words_as_tokens), samples(data)
    assert {s.prompt: s.output_len for s in exact} == {q: len(a.split()) for q, a in pairs.items()}
    assert {s.prompt: s.output_len for s in rough} == {q: len(a) // 4 for q, a in pairs.items()}
    assert [s.prompt for s in exact] != list(pairs), "the order is random"
    chosen = samples(Dataset(name="sharegpt", path=file, seed=1, num_prompts=3, output_len=6))
    assert [(s.prompt, s.output_len) for s in chosen] == [(s.prompt, 6) for s in exact[:3]]


@pytest.mark.parametrize("text", ["[", '{"a": 1}', '[{"conversations": [{"from": "human"}]}]', "[3]"])
def test_a_file_of_another_layout_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "s.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="it is not in ShareGPT's layout"):
        samples(Dataset(name="sharegpt", path=file))


def test_bodies_of_requests() -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    plan = RequestPlan("/v1/completions", "m", {"temperature": 0})
    body = plan.body(Sample([1, 2], output_len=4))
    assert body == {"model": "m", "prompt": [1, 2], "max_tokens": 4, "temperature": 0, **stream}
    talk = [{"role": "system", "content": "s"}]
    chat = RequestPlan("/v1/chat/completions", "m")
    assert chat.body(Sample(None, talk)) == {"model": "m", "messages": talk, **stream}
    assert chat.body(Sample("hi"))["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("endpoint", "sample", "text"),
    [
        ("/v1/completions", Sample(None, [{}]), "/v1/completions does not take conversations"),
        ("/v1/chat/completions", Sample([1]), "/v1/chat/completions does not take token ids"),
    ],
)
def test_prompts_that_an_endpoint_does_not_take(endpoint: str, sample: Sample, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RequestPlan(endpoint, "m").check([Sample("a"), sample])


def test_an_unknown_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        RequestPlan("/v1/completion", "m")
    assert caught.value.remedy == "did you mean '/v1/completions' or '/v1/chat/completions'?"
