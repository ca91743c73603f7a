"""Whatever settings an engine has and whoever else is served, a request gets the tokens that it gets alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
from engines import Models, check_idle
from hf import Tiny
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from text_model import EOS_ID

from jackfield import LLM, SamplingParams
from jackfield.checkpoint import read_facts
from jackfield.engine.output_processor import OutputProcessor
from jackfield.interfaces import DraftBatch, Drafter, DrafterEnv, DrafterRequest, Drafts
from jackfield.protocol import CoreEvent, EngineCoreOutput, EngineCoreRequest, FinishReason, OutputKind
from jackfield.tokenizer import load_tokenizer

LENGTH = 96
COMMON = [(17 * i + 5) % 256 for i in range(48)]
FEW = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Hostile(Drafter):
    """Proposes nonsense: ids outside the vocabulary, holes, and now and then what may be right."""

    name = "hostile"
    summary = "proposes nonsense"
    kinds: ClassVar[frozenset[str]] = frozenset({"hostile"})

    def __init__(self) -> None:
        self._random = np.random.default_rng(3)

    @classmethod
    def build(cls, env: DrafterEnv) -> Hostile:
        return cls()

    @classmethod
    def check(cls, request: DrafterRequest) -> Any:
        return ()

    def propose(self, batch: DraftBatch) -> Drafts:
        assert batch.token_ids is not None
        ids = self._random.integers(-2, 300, (len(batch.slots), self._random.integers(1, 7)))
        for row, (slot, length) in enumerate(zip(batch.slots.tolist(), batch.lengths.tolist(), strict=True)):
            known = batch.token_ids[slot, :length]
            before = np.flatnonzero(known[:-1] == known[-1])
            if len(before) and self._random.random() < 0.7:
                found = known[before[-1] + 1 :][: ids.shape[1]]
                ids[row, : len(found)] = found
        return Drafts(ids)


@dataclass
class Request:
    """One request of a workload: when it comes, and after how many further steps it is given up (or never)."""

    prompt: tuple[int, ...]
    params: dict[str, Any]
    at: int
    abort_after: int | None = None
    priority: int = 0
    id: str = field(default="", compare=False)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    shared = draw(st.sampled_from([0, 0, 7, 16, 33, 48]))
    tail = draw(st.lists(st.integers(0, 255), min_size=shared == 0, max_size=12))
    params: dict[str, Any] = {
        "max_tokens": draw(st.integers(1, 20)),
        "seed": draw(st.integers(0, 3)),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7])),
        "stop_token_ids": draw(st.sampled_from([None, None, list(range(0, 256, 9))])),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 1])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.2])),
    }
    params["min_tokens"] = draw(st.integers(0, min(3, params["max_tokens"])))
    return Request(
        (*COMMON[:shared], *tail),
        params,
        draw(st.integers(0, 10)),
        draw(st.sampled_from([None, None, None, 0, 1, 3, 7])),
        draw(st.integers(-1, 1)),
    )


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    block = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 33, 64]))
    seqs = draw(st.integers(1, 8))
    chunked = draw(st.sampled_from([True, True, True, False]))
    drafter = draw(st.sampled_from([None, None, "ngram", "hostile"]))
    found: dict[str, Any] = {
        "block_size": block,
        "num_blocks": 1 + -(-LENGTH // block) + draw(st.integers(0, 96 // block)),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": draw(st.sampled_from([seqs, seqs + 3, 17, 64, LENGTH])) if chunked else LENGTH,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()) if drafter is None else None,
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 5, 20])) if chunked else 0,
    }
    if drafter is not None:
        found |= {"speculative.method": drafter, "speculative.num_speculative_tokens": draw(st.integers(1, 4))}
        if drafter == "ngram":
            found["plugins.options"] = {"ngram": {"min_n": 1}}
    return found


def start(tiny: Tiny, **changes: Any) -> LLM:
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": LENGTH, **changes}
    return LLM(str(tiny.folder), plugins=[Hostile], **{k: v for k, v in settings.items() if v is not None})


class Alone:
    """Answers of an engine that serves one request at a time, with nothing kept from the ones before."""

    def __init__(self, tiny: Tiny) -> None:
        self._llm = start(tiny, enable_prefix_caching=False, max_num_seqs=1, async_scheduling=False)
        self._known: dict[str, Any] = {}

    def answer(self, request: Request) -> Any:
        key = repr((request.prompt, request.params))
        if key not in self._known:
            params = SamplingParams(**request.params)
            self._known[key] = self._llm.generate([list(request.prompt)], params)[0]
        return self._known[key]


@pytest.fixture(scope="module")
def alone(models: Models) -> Any:
    return cache(lambda name: Alone(models[name]))


def serve(llm: LLM, workload: list[Request]) -> dict[str, Any]:
    """Run a workload step by step; returns the outputs by request id."""
    for request in workload:
        request.id = ""
    done: dict[str, Any] = {}
    step = 0
    while llm._core.has_work() or any(not request.id for request in workload):
        for request in workload:
            if request.at == step:
                prompt = {"prompt_token_ids": list(request.prompt)}
                request.id = llm.enqueue(prompt, SamplingParams(**request.params), priority=request.priority)
            if request.id and request.abort_after is not None and step == request.at + request.abort_after:
                llm.abort(request.id)
        if llm._core.has_work():
            llm._advance()
        step += 1
        assert step < 3000, "the engine makes no progress"
    for output in llm.wait_for_completion():
        done[output.request_id] = output
    return done


def assert_equal(output: Any, expected: Any) -> None:
    one, other = output.outputs[0], expected.outputs[0]
    if one.finish_reason == "abort":
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
    else:
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.stop_reason == other.stop_reason
        assert_logprobs((output.prompt_logprobs or [])[1:], (expected.prompt_logprobs or [])[1:])
    assert_logprobs(one.logprobs or [], (other.logprobs or [])[: len(one.token_ids)])
    if one.logprobs is not None:
        assert len(one.logprobs) == len(one.token_ids)
        total = sum(entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True))
        assert one.cumulative_logprob == pytest.approx(total, abs=1e-4)


def assert_logprobs(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert set(one) == set(other)
        assert {t: e.logprob for t, e in one.items()} == pytest.approx(
            {t: e.logprob for t, e in other.items()}, abs=1e-4
        )


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
@given(changes=engines(), workload=st.lists(requests(), min_size=1, max_size=8))
@FEW
def test_settings_and_company_change_no_token(
    models: Models, alone: Any, name: str, changes: dict[str, Any], workload: list[Request]
) -> None:
    # So many groups of layers need so many times the blocks: one full layer, and two of a window, in groups like it.
    changes["num_blocks"] = {"llama": 1, "mistral": 1, "qwen2": 3}[name] * changes["num_blocks"]
    llm = start(models[name], **changes)
    free = llm._core.scheduler.cache.pool.num_free
    outputs = serve(llm, workload)
    assert len(outputs) == len(workload)
    for request in workload:
        assert_equal(outputs[request.id], alone(name).answer(request))
    check_idle(llm)
    assert llm._core.scheduler.cache.pool.num_free == free
    executor: Any = llm._core._executor
    assert set(executor.worker._runner._parts.state.extras) <= set(llm._core.scheduler._released)


TEXT = "ab, cd\n\nStop here: éß漢字 \U0001f600 tail"


@given(
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=60),
    stops=st.lists(st.sampled_from(["zz", "\n\nStop", "here", "é", "字 \U0001f600", "tail!", " t", "l"]), max_size=3),
    keep=st.booleans(),
    end=st.sampled_from([0, 1, 2, 3]),
    kind=st.sampled_from(list(OutputKind)),
)
@settings(FEW, max_examples=150)
def test_the_grouping_of_tokens_into_steps_changes_no_text(
    text_model: Tiny, cuts: list[int], stops: list[str], keep: bool, end: int, kind: OutputKind
) -> None:
    ids = list(TEXT.encode())[: len(TEXT.encode()) - end]
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep, output_kind=kind, max_tokens=len(ids))
    text, reason = through(text_model, params, ids, cuts)
    whole = bytes(ids).decode("utf-8", errors="replace")
    assert (text, reason) == ended(whole, stops, keep)


@cache
def tokenizer(folder: Any) -> Any:
    return load_tokenizer(folder, read_facts(folder))


def through(tiny: Tiny, params: SamplingParams, ids: list[int], cuts: list[int]) -> tuple[str, str | int | None]:
    """Return what an output processor makes of ids that come in groups: the text that was told, and the stop."""
    processor = OutputProcessor(tokenizer(tiny.folder))
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling_params=params,
        eos_token_ids=[EOS_ID],
        max_tokens=len(ids),
        seed=0,
    )
    processor.add("r", None, [request])
    told, reason, at = "", None, 0
    for turn in range(len(ids)):
        group = ids[at : at + cuts[turn % len(cuts)]]
        at += len(group)
        event = CoreEvent("r", group, FinishReason.LENGTH if at == len(ids) else None)
        outputs, to_abort = processor.process(EngineCoreOutput([event]))
        for output in outputs:
            completion = output.outputs[0]
            told = told + completion.text if params.output_kind is OutputKind.DELTA else completion.text
            reason = completion.stop_reason
        assert to_abort == (["r"] if reason is not None and at < len(ids) else [])
        if at == len(ids) or reason is not None:
            break
    assert processor.num_requests() == 0
    return told, reason


def ended(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """Return the text up to the stop string that is complete first."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not found:
        return text, None
    stop_end, begin, stop = min(found)
    return text[: stop_end if keep else begin], stop
