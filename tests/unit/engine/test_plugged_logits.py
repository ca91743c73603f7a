"""Logits processors are plugins: every row of every request that they want is processed, whatever kind of step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from engine_world import VOCAB, drain, greedy, ids_of, prompt, start

from jackfield import LLM, SamplingParams
from jackfield.errors import ConfigError, RequestError
from jackfield.interfaces import LogitsEnv, LogitsProcessor, LogitsRow, Option, ParamsView

Call = tuple[str, tuple[int, ...]]


class Residue(LogitsProcessor):
    """Lets only ids through that are equal to the place modulo ``base``, for requests with ``residue`` in extra_args;
    with ``exact`` only the one id that is the remainder.
    """

    name = "residue"
    options = {"base": Option(int, 5), "exact": Option(bool, False)}
    calls: ClassVar[list[Call]] = []

    def __init__(self, env: LogitsEnv) -> None:
        self._ids = torch.arange(env.vocab_size, device=env.device)
        self._base: int = env.settings["base"]
        self._kept = self._ids if env.settings["exact"] else self._ids % self._base

    @classmethod
    def wants(cls, params: ParamsView) -> bool:
        value = (params.extra_args or {}).get("residue", False)
        if not isinstance(value, bool):
            raise RequestError("residue must be true or false", field="sampling_params.extra_args", value=value)
        return value

    @classmethod
    def build(cls, env: LogitsEnv) -> Residue:
        return cls(env)

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        assert len(rows) == len(logits_RV)
        for logits_V, row in zip(logits_RV, rows, strict=True):
            assert row.extra_args["residue"] is True
            self.calls.append((row.request_id, tuple(row.token_ids.tolist())))
            logits_V[self._kept != len(row.token_ids) % self._base] = float("-inf")


class Halve(LogitsProcessor):
    """Halves all logits: the largest stays the largest."""

    name = "halve"
    argmax_invariant = True
    count: ClassVar[list[int]] = []

    @classmethod
    def build(cls, env: LogitsEnv) -> Halve:
        return cls()

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        self.count.append(len(rows))
        logits_RV *= 0.5


class Plus(Halve):
    """Adds one to id 7 and writes down that it came."""

    name = "plus"
    argmax_invariant = False

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        self.count.append(-len(rows))
        logits_RV[:, 7] += 1.0


class Curious(Halve):
    """Raises when a request comes in."""

    name = "curious"

    @classmethod
    def wants(cls, params: ParamsView) -> bool:
        raise KeyError("level")


class RecordedSteps:
    """Stands in for recorded graphs where there are none: does what a replay does, and counts them."""

    def __init__(self, llm: LLM) -> None:
        self._runner: Any = llm._core._executor.worker._runner  # type: ignore[attr-defined]
        self.replays = 0
        self._runner._parts.graphs = self

    def fits(self, plan: Any) -> bool:
        return bool((plan.counts == 1).all() and plan.samples.all())

    def replay(self, plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.replays += 1
        batch = self._runner._parts.batch
        logits = self._runner.forward_logits(batch.prepare(plan))
        ids = logits.argmax(-1)
        batch.write_tokens(plan.slots, plan.starts + 1, ids.numpy().astype(np.int32))
        return logits, ids


@pytest.fixture(autouse=True)
def forget_calls() -> None:
    Residue.calls.clear()
    Halve.count.clear()


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "chunked": {"max_num_batched_tokens": 5},
    "preempted": {"num_blocks": 34, "max_model_len": 128, "enable_prefix_caching": False},
    "ngram": {
        "speculative": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
        "max_num_batched_tokens": 24,
    },
    "accepted": {
        "speculative": {"method": "ngram", "adaptive": False},
        "plugins.options": {"residue": {"base": 4, "exact": True}},
    },
    "recorded": {},
}
BASES = {"accepted": 4}
WANTED = {"extra_args": {"residue": True}}
PROMPTS = [[1, 2, 3] * 5, prompt(1, 18), [5] * 9, prompt(2, 4)]


def start_with(model: str, names: Sequence[str], **settings: Any) -> LLM:
    plugins = [Residue, Halve, Plus, Curious]
    return start(model, plugins=plugins, logits_processors=list(names), **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_every_token_of_every_wanting_request_was_processed(model: str, mode: str, temperature: float) -> None:
    llm = start_with(model, ["residue"], **MODES[mode])
    recorded = RecordedSteps(llm) if mode == "recorded" else None
    wanting = msgspec.structs.replace(greedy(30, **WANTED), temperature=temperature, seed=3)
    plain = msgspec.structs.replace(wanting, extra_args=None)
    params = [wanting, plain, wanting, plain]
    outputs = llm.generate(PROMPTS, params)
    calls, base = set(Residue.calls), BASES.get(mode, 5)
    for output, one in zip(outputs, params, strict=True):
        ids, asked = output.outputs[0].token_ids, output.prompt_token_ids
        assert len(ids) == 30
        needed = {(output.request_id, (*asked, *ids[:place])) for place in range(len(ids))}
        if one is wanting:
            assert [token % base for token in ids] == [(len(asked) + place) % base for place in range(len(ids))]
            assert needed <= calls, "a token was sampled from logits that were not processed"
        else:
            assert not any(name == output.request_id for name, _ in calls)
    assert recorded is None or recorded.replays > 20
    assert mode != "preempted" or llm.get_metrics().preemptions > 0
    assert mode != "accepted" or llm.get_metrics().drafts_accepted > 20
    drain(llm)
    Residue.calls.clear()
    options = {key: value for key, value in MODES[mode].items() if key == "plugins.options"}
    alone = start_with(model, ["residue"], **options)
    assert [ids_of(alone, [p], q)[0] for p, q in zip(PROMPTS, params, strict=True)] == [
        output.outputs[0].token_ids for output in outputs
    ]


def test_no_call_is_made_twice_in_plain_steps(model: str) -> None:
    llm = start_with(model, ["residue"])
    ids_of(llm, PROMPTS, greedy(6, **WANTED))
    assert len(Residue.calls) == len(set(Residue.calls)) == 6 * len(PROMPTS)


def test_drafts_are_really_verified_on_processed_rows(model: str) -> None:
    llm = start_with(model, ["residue"], **MODES["accepted"])
    name = llm.enqueue(PROMPTS[0], greedy(40, **WANTED))
    steps = 0
    while name not in llm._done:
        llm._advance()
        steps += 1
    llm.wait_for_completion()
    assert steps < 25, "drafts are kept"
    assert len(Residue.calls) >= 40


def test_a_processor_that_is_not_named_changes_nothing(model: str) -> None:
    ids = ids_of(start(model), PROMPTS, greedy(6))
    assert ids_of(start_with(model, []), PROMPTS, greedy(6, **WANTED)) == ids
    assert ids_of(start_with(model, ["residue"]), PROMPTS, greedy(6)) == ids
    assert Residue.calls == []


def test_processors_run_in_the_order_of_the_setting(model: str) -> None:
    sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=2, ignore_eos=True, detokenize=False)
    for names, expected in ((["halve", "plus"], [1, -1, 1, -1]), (["plus", "halve"], [-1, 1, -1, 1])):
        Halve.count.clear()
        ids_of(start_with(model, names), [PROMPTS[0]], sampled)
        assert Halve.count == expected


def test_what_cannot_change_a_greedy_token_is_left_out_unless_something_else_can(model: str) -> None:
    llm = start_with(model, ["halve"])
    ids_of(llm, PROMPTS, greedy(3))
    assert Halve.count == []
    both = start_with(model, ["halve", "plus"])
    ids_of(both, [PROMPTS[0]], greedy(3))
    assert Halve.count == [1, -1] * 3
    sampled = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, detokenize=False)
    Halve.count.clear()
    ids_of(llm, [PROMPTS[0]], sampled)
    assert Halve.count == [1] * 3


def test_a_wanted_row_is_no_plain_greedy_row(model: str) -> None:
    llm = start_with(model, ["residue"])
    state = llm._core._executor.worker._runner._parts.state  # type: ignore[attr-defined]
    for args, plain in ((None, True), ({"residue": True}, False)):
        name = llm.enqueue(PROMPTS[0], greedy(3, extra_args=args))
        llm._advance()
        slots = np.array([s for s, extras in state.extras.items() if extras.request_id == name], dtype=np.int32)
        assert len(slots) == 1
        assert state.plain_greedy(slots) is plain
        llm.wait_for_completion()


def test_log_probabilities_stay_those_of_the_model(model: str) -> None:
    asked = greedy(1, logprobs=VOCAB)
    raw = start(model).generate([PROMPTS[0]], asked)[0].outputs[0].logprobs
    processed = start_with(model, ["residue"]).generate([PROMPTS[0]], greedy(1, logprobs=VOCAB, **WANTED))
    found = processed[0].outputs[0].logprobs
    assert raw is not None and found is not None
    assert len(found[0]) == VOCAB
    assert {token: entry.logprob for token, entry in found[0].items()} == {
        token: entry.logprob for token, entry in raw[0].items()
    }
    assert processed[0].outputs[0].token_ids[0] % 5 == len(PROMPTS[0]) % 5


def test_unknown_names_are_errors_that_list_all(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start_with(model, ["residu", "halve", "nothing_like_it"])
    error = caught.value
    assert error.field == "sampling.logits_processors"
    assert error.message == (
        "no such plugin in logits_processors: sampling.logits_processors names 'residu'; "
        "sampling.logits_processors names 'nothing_like_it'"
    )
    assert error.remedy.startswith("did you mean 'residue'? installed: curious, halve, plus, residue")


def test_a_name_twice_is_an_error(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start_with(model, ["halve", "plus", "halve"])
    assert caught.value.message == "logits processors are named twice: halve (api: logits_processors)"
    assert caught.value.field == "sampling.logits_processors"


def test_a_processor_may_refuse_a_request(model: str) -> None:
    llm = start_with(model, ["residue"])
    with pytest.raises(RequestError) as caught:
        llm.generate([PROMPTS[0]], greedy(1, extra_args={"residue": 3}))
    assert (caught.value.message, caught.value.value) == ("residue must be true or false", 3)
    drain(llm)


def test_a_processor_that_cannot_tell_refuses_the_request(model: str) -> None:
    llm = start_with(model, ["curious"])
    with pytest.raises(RequestError) as caught:
        llm.generate([PROMPTS[0]], greedy(1, extra_args={"a": 1}))
    said = "logits processor 'curious' cannot tell whether it wants the request: KeyError: 'level'"
    assert caught.value.message == said
    assert (caught.value.field, caught.value.value) == ("sampling_params.extra_args", {"a": 1})
    drain(llm)


def test_options_reach_the_processor(model: str) -> None:
    llm = start_with(model, ["residue"], **{"plugins.options": {"residue": {"base": 2}}})
    ids = ids_of(llm, [PROMPTS[0]], greedy(8, **WANTED))[0]
    assert [token % 2 for token in ids] == [(15 + place) % 2 for place in range(8)]


def test_the_report_names_the_processors(model: str) -> None:
    llm = start_with(model, ["plus", "halve"])
    assert llm.report.summary().endswith(" · processors plus+halve")


class Fragile(Halve):
    """Fails at the fourth token of requests that say so."""

    name = "fragile"
    argmax_invariant = False

    @classmethod
    def wants(cls, params: ParamsView) -> bool:
        return bool((params.extra_args or {}).get("fragile"))

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        if any(len(row.token_ids) - row.prompt_length == 3 for row in rows):
            raise ZeroDivisionError("three")


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}], ids=["plain", "overlapped"])
def test_a_processor_that_raises_ends_its_requests_and_no_others(model: str, settings: dict[str, Any]) -> None:
    llm = start(model, plugins=[Fragile], logits_processors=["fragile"], **settings)
    wanting, plain = greedy(12, extra_args={"fragile": True}), greedy(12)
    expected = ids_of(start(model), PROMPTS[1::2], plain)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, [wanting, plain, wanting, plain])
        for output in outputs[::2]:
            assert output.outputs[0].finish_reason == "error"
            assert output.outputs[0].error == "logits processor 'fragile' failed: ZeroDivisionError: three"
            assert len(output.outputs[0].token_ids) == 3, "nothing comes from logits that were not processed"
        assert [output.outputs[0].token_ids for output in outputs[1::2]] == expected
    drain(llm)
