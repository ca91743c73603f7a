"""What is told of drafts is what happened, and the settings of speculation act."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from engines import Engine, Models
from hf import random_prompts
from speculation_drafters import Guessing, Knowing, TestDrafter

from jackfield import LLM, SamplingParams
from jackfield.errors import ConfigError

WISH = SamplingParams(temperature=0.0, max_tokens=31, ignore_eos=True)
PROMPTS = random_prompts((5, 9, 14))


class Perfect(Knowing):
    """Makes no mistakes."""

    name = "perfect"
    mistakes: ClassVar[float] = 0.0

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.limits: list[int] = []

    def ids(self, batch: Any) -> Any:
        self.limits.append(int(batch.limits.max(initial=0)))
        return super().ids(batch)


def drafting(engine: Engine, models: Models, kind: type[TestDrafter], **settings: Any) -> LLM:
    speculative = {"speculative.method": kind.name, "speculative.num_speculative_tokens": 4}
    return engine(models["llama"].folder, plugins=[kind], **{**speculative, **settings})


def drafter_of(llm: LLM) -> Any:
    return llm._core._executor.worker._runner._speculation.drafter  # type: ignore[attr-defined]


@pytest.fixture
def known(engine: Engine, models: Models) -> list[list[int]]:
    """Make the knowing drafters know what the model says; returns the answers."""
    outputs = engine(models["llama"].folder).generate(PROMPTS, WISH)
    Knowing.texts = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
    return [o.outputs[0].token_ids for o in outputs]


def test_drafts_that_are_always_right(engine: Engine, models: Models, known: list[list[int]]) -> None:
    """One token comes with the prompt, and 30 in six rounds of four drafts and one token more."""
    llm = drafting(engine, models, Perfect, **{"speculative.adaptive": False})
    for prompt, answer in zip(PROMPTS, known, strict=True):
        (output,) = llm.generate([prompt], WISH)
        assert output.outputs[0].token_ids == answer
        told = output.metrics
        assert (told.draft_rounds, told.drafts_proposed, told.drafts_accepted) == (6, 24, 24)
    metrics = llm.get_metrics()
    assert (metrics.draft_rounds, metrics.drafts_proposed, metrics.drafts_accepted) == (18, 72, 72)
    assert metrics.accepted_per_position == (18, 18, 18, 18)
    assert metrics.mean_acceptance_length == 5.0
    assert metrics.draft_acceptance_rate == 1.0


def test_figures_of_requests_add_up_to_those_of_the_engine(
    engine: Engine, models: Models, known: list[list[int]]
) -> None:
    llm = drafting(engine, models, Knowing, block_size=4, num_blocks=28, kv_cache_memory=None, max_model_len=64)
    outputs = llm.generate(PROMPTS * 2, WISH)
    metrics, told = llm.get_metrics(), [o.metrics for o in outputs]
    assert metrics.preemptions > 0, "figures must survive a preemption"
    assert sum(t.draft_rounds for t in told) == metrics.draft_rounds > 0
    assert sum(t.drafts_proposed for t in told) == metrics.drafts_proposed
    assert sum(t.drafts_accepted for t in told) == metrics.drafts_accepted > 0
    assert sum(metrics.accepted_per_position) == metrics.drafts_accepted
    assert list(metrics.accepted_per_position) == sorted(metrics.accepted_per_position, reverse=True)


def test_without_drafts_nothing_is_told(engine: Engine, models: Models) -> None:
    llm = engine(models["llama"].folder)
    (output,) = llm.generate([PROMPTS[0]], WISH)
    assert output.metrics.draft_rounds == 0
    assert llm.get_metrics().accepted_per_position == ()
    assert llm.get_metrics().mean_acceptance_length == 1.0


def test_no_drafts_in_batches_that_are_too_large(engine: Engine, models: Models, known: list[list[int]]) -> None:
    llm = drafting(engine, models, Perfect, **{"speculative.disable_by_batch_size": 2})
    together = llm.generate(PROMPTS, WISH)
    assert [o.outputs[0].token_ids for o in together] == known
    assert llm.get_metrics().drafts_proposed == 0
    llm.generate(PROMPTS[:2], WISH)
    assert llm.get_metrics().drafts_proposed > 0


def test_drafts_that_are_always_wrong_are_given_up(engine: Engine, models: Models) -> None:
    """A token costs a step's time and a draft is worth nothing: soon nearly nothing is drafted."""
    always = drafting(engine, models, Guessing, **{"speculative.adaptive": False})
    rarely = drafting(engine, models, Guessing)
    wish = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    assert [o.outputs[0].token_ids for o in always.generate(PROMPTS * 4, wish)] == [
        o.outputs[0].token_ids for o in rarely.generate(PROMPTS * 4, wish)
    ]
    assert rarely.get_metrics().drafts_proposed < 0.5 * always.get_metrics().drafts_proposed


def test_nothing_is_drafted_past_the_end(engine: Engine, models: Models, known: list[list[int]]) -> None:
    """The last token is never a draft's to verify: of a request for 4 tokens one comes with the prompt, and the next
    step gives a token of its own.
    """
    llm = drafting(engine, models, Perfect, **{"speculative.adaptive": False})
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert output.outputs[0].token_ids == known[0][:4]
    assert (output.metrics.draft_rounds, output.metrics.drafts_proposed) == (1, 2)
    assert drafter_of(llm).limits == [2, 1], "what nobody could use is not asked for"


@pytest.mark.parametrize(
    "setting",
    [
        {"speculative.adaptive": False},
        {"speculative.disable_by_batch_size": 4},
        {"speculative.rejection_sample_method": "block"},
        {"speculative.draft_sample_method": "greedy"},
    ],
    ids=lambda s: next(iter(s)).split(".")[1],
)
def test_settings_that_do_nothing_without_a_drafter_are_refused(
    engine: Engine, models: Models, setting: dict[str, Any]
) -> None:
    (field,) = setting
    with pytest.raises(ConfigError, match=f"{field} does nothing without a method"):
        engine(models["llama"].folder, **setting)
