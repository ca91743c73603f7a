"""What a request's parameters promise: seeds, several completions, stops, output kinds, aborts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from engines import Engine
from hf import Tiny, random_prompts
from text_model import EOS_ID, letters, text_of

from jackfield import LLM, SamplingParams
from jackfield.protocol import OutputKind

PROMPT = "the quick brown fox"
LETTERS = SamplingParams(temperature=0.0, max_tokens=40, allowed_token_ids=letters())


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def llm(request: pytest.FixtureRequest, engine: Engine, text_model: Tiny) -> LLM:
    return engine(text_model.folder, skip_tokenizer_init=False, async_scheduling=request.param)


def change(params: SamplingParams, **changes: Any) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)


def one(llm: LLM, params: SamplingParams, prompt: str = PROMPT) -> Any:
    return llm.generate(prompt, params)[0].outputs[0]


def test_seeded_requests_do_not_depend_on_their_company(llm: LLM) -> None:
    prompts = random_prompts([3 + 5 * i for i in range(16)])
    params = [
        SamplingParams(
            seed=100 + i,
            temperature=0.5 + 0.1 * i,
            top_p=1.0 if i % 2 else 0.9,
            top_k=0 if i % 3 else 40,
            repetition_penalty=1.0 + 0.05 * (i % 4),
            max_tokens=16 + i,
            ignore_eos=True,
        )
        for i in range(16)
    ]
    batch = [request.outputs[0].token_ids for request in llm.generate(prompts, params)]
    alone = [llm.generate([p], q)[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)]
    assert batch == alone
    other = [change(q, seed=(q.seed or 0) + 1000) for q in params]
    assert [request.outputs[0].token_ids for request in llm.generate(prompts, other)] != batch


def test_requests_without_a_seed_draw_afresh(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True)
    assert one(llm, params).token_ids != one(llm, params).token_ids


def test_engine_seed_makes_unseeded_requests_repeatable(engine: Engine, text_model: Tiny) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True)
    runs = [
        [one(llm, params).token_ids for _ in range(2)]
        for llm in (engine(text_model.folder, skip_tokenizer_init=False, seed=seed) for seed in (5, 5, 6))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_three_completions_are_the_seeds_that_follow(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    request = llm.generate(PROMPT, params)[0]
    assert [completion.index for completion in request.outputs] == [0, 1, 2]
    singles = [one(llm, change(params, n=1, seed=7 + i)).token_ids for i in range(3)]
    assert [completion.token_ids for completion in request.outputs] == singles
    assert len({tuple(ids) for ids in singles}) == 3


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("place", [(0, 1), (5, 6), (10, 13), (36, 40)])
def test_stop_strings(llm: LLM, place: tuple[int, int], keep: bool) -> None:
    whole = one(llm, LETTERS).text
    assert len(whole) == 40
    stop = whole[slice(*place)]
    begins = whole.find(stop)
    completion = one(llm, change(LETTERS, stop=["@@", stop], include_stop_str_in_output=keep))
    assert completion.text == whole[: begins + len(stop) if keep else begins]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert text_of(completion.token_ids) == whole[: begins + len(stop)]


def test_stream_holds_back_what_may_become_a_stop_string(llm: LLM) -> None:
    whole = one(llm, LETTERS).text
    stop = whole[10:16]
    texts = [request.outputs[0].text for request in llm.stream(PROMPT, change(LETTERS, stop=stop))]
    final = whole[: whole.find(stop)]
    assert texts[-1] == one(llm, change(LETTERS, stop=stop)).text == final
    assert all(final.startswith(text) for text in texts)
    assert len(texts) > len(final)


def test_a_stop_string_that_does_not_come_changes_nothing(llm: LLM) -> None:
    plain = one(llm, LETTERS)
    completion = one(llm, change(LETTERS, stop=[plain.text[-2:] + "@", "0"]))
    assert (completion.text, completion.token_ids) == (plain.text, plain.token_ids)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_stop_token_ids(llm: LLM) -> None:
    whole = one(llm, LETTERS).token_ids
    stop = whole[6]
    first = whole.index(stop)
    completion = one(llm, change(LETTERS, stop_token_ids=[stop]))
    assert completion.token_ids == whole[: first + 1]
    assert completion.text == text_of(whole[:first])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    kept = one(llm, change(LETTERS, stop_token_ids=[stop], include_stop_str_in_output=True))
    assert kept.text == text_of(whole[: first + 1])


def test_end_of_text_ends_and_is_no_part_of_the_text(llm: LLM) -> None:
    likely = SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=[97, EOS_ID], logit_bias={EOS_ID: 100.0})
    completion = one(llm, likely)
    assert (completion.token_ids, completion.text) == ([EOS_ID], "")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    ignoring = one(llm, change(likely, ignore_eos=True))
    assert (ignoring.token_ids, ignoring.finish_reason) == ([EOS_ID] * 9, "length")


def test_min_tokens_holds_off_every_stop(llm: LLM) -> None:
    likely = SamplingParams(
        temperature=0.0, max_tokens=9, min_tokens=5, allowed_token_ids=[97, EOS_ID], logit_bias={EOS_ID: 100.0}
    )
    assert one(llm, likely).token_ids == [97] * 5 + [EOS_ID]
    repeated = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=5, allowed_token_ids=[97], stop=["a"])
    completion = one(llm, repeated)
    assert (completion.token_ids, completion.text) == ([97] * 6, "a" * 5)
    by_id = one(llm, change(LETTERS, min_tokens=5, max_tokens=9, stop_token_ids=letters()[1:]))
    assert len(by_id.token_ids) > 5


def test_no_limit_means_what_is_left_of_the_context(llm: LLM) -> None:
    prompt = random_prompts((500,))[0]
    completion = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (12, "length")


ANY_BYTES = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("params", [LETTERS, ANY_BYTES, change(ANY_BYTES, n=3)], ids=["letters", "bytes", "three"])
def test_output_kinds_agree(llm: LLM, params: SamplingParams) -> None:
    final = llm.generate(PROMPT, params)[0]
    growing = list(llm.stream(PROMPT, change(params, output_kind=OutputKind.CUMULATIVE)))
    deltas = list(llm.stream(PROMPT, change(params, output_kind=OutputKind.DELTA)))
    last = list(llm.stream(PROMPT, change(params, output_kind=OutputKind.FINAL_ONLY)))
    assert len(last) == 1
    assert [request.finished for request in growing].count(True) == 1
    for index, completion in enumerate(final.outputs):
        assert last[0].outputs[index] == completion
        assert growing[-1].outputs[index] == completion
        parts = [request.outputs[index] for request in deltas]
        assert "".join(part.text for part in parts) == completion.text
        assert [i for part in parts for i in part.token_ids] == completion.token_ids
        assert [p for part in parts for p in part.logprobs or []] == (completion.logprobs or [])
        assert parts[-1].finish_reason == completion.finish_reason
        texts = [request.outputs[index].text for request in growing]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_sampled_tokens_carry_their_rank(llm: LLM) -> None:
    completion = one(llm, change(ANY_BYTES, logprobs=-1))
    ranks = []
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(entry) == 260
        ranks.append(entry[token].rank)
        assert entry[token].rank == 1 + sum(found.logprob > entry[token].logprob for found in entry.values())
    assert max(ranks) > 1


def test_abort_in_mid_stream_leaves_a_working_engine(llm: LLM) -> None:
    expected = one(llm, LETTERS).token_ids
    stream = llm.stream("another prompt altogether", LETTERS)
    seen = [next(stream).outputs[0].token_ids for _ in range(3)]
    assert len(seen[-1]) >= 3
    stream.close()
    assert one(llm, LETTERS).token_ids == expected


def test_abort_of_several_completions(llm: LLM) -> None:
    stream = llm.stream(PROMPT, change(ANY_BYTES, n=3))
    next(stream)
    stream.close()
    assert len(one(llm, LETTERS).token_ids) == 40


def test_texts_and_their_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = list(PROMPT.encode())
    prompts: list[Any] = [PROMPT, {"prompt_token_ids": ids}]
    by_text, by_ids = llm.generate(prompts, LETTERS)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids
    assert (by_text.prompt, by_ids.prompt) == (PROMPT, None)
    assert by_text.outputs[0] == by_ids.outputs[0]


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a" * n for n in (30, 1, 12)]
    params = [change(LETTERS, max_tokens=n) for n in (30, 1, 7)]
    requests = llm.generate(prompts, params)
    assert [request.prompt for request in requests] == prompts
    assert [len(request.outputs[0].token_ids) for request in requests] == [30, 1, 7]


@pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.DELTA, OutputKind.FINAL_ONLY])
def test_a_stream_survives_other_requests(llm: LLM, kind: OutputKind) -> None:
    params = change(LETTERS, output_kind=kind)
    expected = [request.outputs[0].text for request in llm.stream(PROMPT, params)]
    stream = llm.stream(PROMPT, params)
    first = [] if kind is OutputKind.FINAL_ONLY else [next(stream)]
    other = one(llm, change(LETTERS, max_tokens=60), prompt="something else")
    assert len(other.token_ids) == 60
    assert [request.outputs[0].text for request in (*first, *stream)] == expected


def test_streams_take_turns(llm: LLM) -> None:
    prompts = [PROMPT, "something else", "x"]
    expected = [one(llm, LETTERS, prompt).text for prompt in prompts]
    streams = [llm.stream(prompt, change(LETTERS, output_kind=OutputKind.DELTA)) for prompt in prompts]
    texts = ["", "", ""]
    for parts in zip(*streams, strict=True):
        texts = [text + part.outputs[0].text for text, part in zip(texts, parts, strict=True)]
    assert texts == expected
