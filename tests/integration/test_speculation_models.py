"""A draft model changes no token of a greedy request and no distribution of another, and shares the target's blocks."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Engine, Models
from hf import Tiny, make_tiny, random_prompts
from speculation_drafters import watch

from jackfield import LLM, SamplingParams
from jackfield.errors import ConfigError, NoCandidateError

PROMPTS = random_prompts((3, 7, 18, 41))
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
LENGTH = 96


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """One layer, fewer heads, another size."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_tiny(tmp_path_factory.mktemp("small"), "llama", **sizes)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A vocabulary that is padded further than the target's."""
    return make_tiny(tmp_path_factory.mktemp("padded"), "qwen3", vocab_size=272, num_hidden_layers=2, head_dim=16)


def drafting(engine: Engine, target: Tiny, draft: Tiny, drafts: int = 3, **settings: Any) -> LLM:
    speculative = {
        "speculative.method": "draft_model",
        "speculative.model": str(draft.folder),
        "speculative.num_speculative_tokens": drafts,
        "speculative.adaptive": False,
        "max_model_len": LENGTH,
    }
    return engine(target.folder, **{**speculative, **settings})


def tokens(llm: LLM, params: SamplingParams = GREEDY, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture
def alone(engine: Engine, models: Models) -> list[list[int]]:
    return tokens(engine(models["llama"].folder, max_model_len=LENGTH))


SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks of 1": {"block_size": 1},
    "chunks": {"long_prefill_token_threshold": 5},
    "a small budget": {"max_num_batched_tokens": 16},
    "few blocks": {"block_size": 4, "num_blocks": 30, "kv_cache_memory": None},
    "no prefix cache": {"enable_prefix_caching": False},
    "one at a time": {"max_num_seqs": 1},
    "one draft": {"speculative.num_speculative_tokens": 1},
    "many drafts": {"speculative.num_speculative_tokens": 9},
    "as many as pay": {"speculative.adaptive": True},
}
QUICK = ("plain", "chunks", "few blocks", "as many as pay")
MARKED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SETUPS]


@pytest.mark.parametrize("setup", MARKED)
def test_greedy_tokens_are_those_without_drafts(
    engine: Engine, models: Models, small: Tiny, alone: list[list[int]], setup: str
) -> None:
    llm = drafting(engine, models["llama"], small, **SETUPS[setup])
    assert tokens(llm) == alone
    assert tokens(llm) == alone, "and again, with what the first time left in the cache"
    metrics = llm.get_metrics()
    assert metrics.drafts_proposed > 0
    assert (metrics.preemptions > 0) == (setup == "few blocks")


@pytest.mark.parametrize("setup", MARKED)
def test_a_draft_model_that_is_the_target_has_all_drafts_kept(
    engine: Engine, models: Models, alone: list[list[int]], setup: str
) -> None:
    """Every draft that was refused would show a cache of the draft model that is not what it should be."""
    llm = drafting(engine, models["llama"], models["llama"], **SETUPS[setup])
    for _ in range(2):
        assert tokens(llm) == alone
    metrics = llm.get_metrics()
    assert metrics.drafts_accepted == metrics.drafts_proposed > 0


def test_drafts_are_what_the_draft_model_says(engine: Engine, models: Models, small: Tiny) -> None:
    """Greedy drafts behind a known text are the reference's greedy continuation by the draft model alone."""
    llm = drafting(engine, models["llama"], small, drafts=4)
    seen = watch(llm)
    tokens(llm)
    compared = 0
    for text, drafts in seen:
        for place, draft in enumerate(drafts):
            with torch.no_grad():
                logits = small.model(torch.tensor([[*text, *drafts[:place]]])).logits[0, -1]
            assert float(logits.max() - logits[draft]) < 1e-4
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drafted_past_the_draft_models_context(
    engine: Engine, models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture, temperature: float
) -> None:
    """Sequences of other lengths, which can still be drafted for, are beside those that cannot."""
    short = make_tiny(tmp_path, "llama", max_position_embeddings=32)
    llm = drafting(engine, models["llama"], short)
    seen = watch(llm)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24, ignore_eos=True)
    with caplog.at_level(logging.WARNING, logger="jackfield"):
        tokens(llm, params)
    assert not caplog.records, "the drafter was switched off"
    assert sum(bool(drafts) for _, drafts in seen) > 10
    assert [drafts for text, drafts in seen if len(text) > 32 and drafts] == []
    assert all(len(text) + len(drafts) <= 33 for text, drafts in seen if drafts)


def test_a_draft_model_is_asked_for_what_the_target_is(engine: Engine, models: Models, small: Tiny) -> None:
    """``batch_invariant`` holds for both: what is drafted decides what is kept."""
    llm = drafting(engine, models["llama"], small, batch_invariant=True)
    asked = {
        d.request["component"]: "batch_invariant" in d.request["needs"]
        for d in llm.report.decisions
        if d.family == "attention_backends"
    }
    assert asked == {"target": True, "drafter": True}


def test_drafts_of_other_architectures_and_wider_vocabularies(
    engine: Engine, models: Models, padded: Tiny, alone: list[list[int]]
) -> None:
    assert tokens(drafting(engine, models["llama"], padded)) == alone


def test_a_target_whose_layers_are_all_windows_has_the_draft_in_a_group_of_its_own(
    engine: Engine, models: Models, small: Tiny
) -> None:
    expected = tokens(engine(models["mistral"].folder, max_model_len=LENGTH))
    llm = drafting(engine, models["mistral"], small, block_size=4)
    assert len(llm._core.scheduler.cache.groups) == 2
    assert tokens(llm) == expected


def test_draft_layers_lie_in_the_blocks_of_the_target(engine: Engine, models: Models, small: Tiny) -> None:
    plan = drafting(engine, models["llama"], small, block_size=16)._core.plan
    (group,) = plan.groups
    assert len(group.layers) == 4
    # Keys and values, float32: 3 layers of 2 heads of 16, and one layer of one head of 16.
    assert plan.page_bytes == 16 * 2 * 4 * (3 * 2 * 16 + 16)


def test_a_short_draft_model_stops_drafting_where_it_ends(engine: Engine, models: Models, tmp_path: Path) -> None:
    short = make_tiny(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=32)
    expected = tokens(engine(models["llama"].folder, max_model_len=LENGTH))
    llm = drafting(engine, models["llama"], short)
    assert tokens(llm) == expected
    assert llm.get_metrics().drafts_proposed > 0


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sampled_tokens_follow_the_target(engine: Engine, models: Models, small: Tiny, method: str) -> None:
    """The second token of many requests, whose first is forced by a prompt they share."""
    params = {"temperature": 1.0, "top_k": 6, "max_tokens": 2, "ignore_eos": True}
    wishes = [SamplingParams(**params, seed=seed) for seed in range(1500)]  # type: ignore[arg-type]
    llm = drafting(engine, models["llama"], small, **{"speculative.rejection_sample_method": method}, max_num_seqs=64)
    found = [tuple(o.outputs[0].token_ids) for o in llm.generate([PROMPTS[0]] * len(wishes), wishes)]
    again = [tuple(o.outputs[0].token_ids) for o in llm.generate([PROMPTS[0]] * 20, wishes[:20])]
    assert again == found[:20], "a seed gives the same tokens again"
    reference = models["llama"].model
    statistic, cells = 0.0, 0
    with torch.no_grad():
        first = _filtered(reference(torch.tensor([PROMPTS[0]])).logits[0, -1])
        for token in np.flatnonzero(first).tolist():
            second = _filtered(reference(torch.tensor([[*PROMPTS[0], token]])).logits[0, -1])
            for other in np.flatnonzero(second).tolist():
                expected = len(wishes) * first[token] * second[other]
                statistic += (found.count((token, other)) - expected) ** 2 / expected
                cells += 1
    assert cells == 36
    assert statistic < 35 * (1 - 2 / (9 * 35) + 4 * (2 / (9 * 35)) ** 0.5) ** 3


def _filtered(logits: torch.Tensor) -> np.ndarray[Any, Any]:
    best = logits.double().topk(6)
    p = torch.zeros_like(logits, dtype=torch.float64)
    p[best.indices] = best.values.softmax(-1)
    return p.numpy()


def test_a_report_names_the_draft_models_parts(engine: Engine, models: Models, small: Tiny) -> None:
    report = drafting(engine, models["llama"], small).report
    parts = {d.family for d in report.decisions if d.request.get("component") == "drafter"}
    assert {"models", "quantization_methods", "attention_backends"} <= parts


def test_words_on_the_drafters_attention_act(engine: Engine, models: Models, small: Tiny, alone: Any) -> None:
    llm = drafting(engine, models["llama"], small, **{"attention.components": {"drafter": {"force": "torch_sdpa"}}})
    chosen = {d.request.get("component"): d.name for d in llm.report.decisions if d.family == "attention_backends"}
    assert chosen["drafter"] == "torch_sdpa"
    assert tokens(llm) == alone
    with pytest.raises(ConfigError, match="names 'drafter'"):
        engine(models["llama"].folder, **{"attention.components": {"drafter": {"force": "torch_sdpa"}}})


def test_without_a_model_it_is_refused(engine: Engine, models: Models) -> None:
    with pytest.raises(NoCandidateError, match="draft_checkpoint") as caught:
        engine(models["llama"].folder, **{"speculative.method": "draft_model"})
    assert "speculative.model" in str(caught.value)


def test_nothing_is_logged(engine: Engine, models: Models, small: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    """No test above passes because the drafter was switched off."""
    with caplog.at_level(logging.WARNING, logger="jackfield"):
        tokens(drafting(engine, models["llama"], small))
    assert not caplog.records


UNKNOWN = {ord("e"), ord("t")}


def test_a_draft_model_of_another_vocabulary_drafts_what_both_have(
    engine: Engine, text_model: Tiny, tmp_path: Path
) -> None:
    """The draft model is the target with its tokens in reverse order, and two of them spelled otherwise, which the
    target never says: all its drafts are right, until it reads what it does not know.
    """
    target = copied(text_model, tmp_path / "target", list(range(260)), set())
    draft = copied(text_model, tmp_path / "draft", [255 - i if i < 256 else i for i in range(260)], UNKNOWN)
    llm = drafting(engine, target, draft, skip_tokenizer_init=False)
    alone = engine(target.folder, max_model_len=LENGTH)
    for prompts, rate in (([list(b"abc abd"), list(b"quick fox")], 1.0), ([list(b"the rest")], 0.0)):
        before = llm.get_metrics()
        assert tokens(llm, GREEDY, prompts) == tokens(alone, GREEDY, prompts)
        after = llm.get_metrics()
        kept, all_of_them = (
            getattr(after, name) - getattr(before, name) for name in ("drafts_accepted", "drafts_proposed")
        )
        assert all_of_them > 20
        assert kept / all_of_them >= rate
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    assert tokens(llm, drawn, PROMPTS) == tokens(llm, drawn, PROMPTS)


def copied(tiny: Tiny, folder: Path, order: list[int], unknown: set[int]) -> Tiny:
    """Return a copy of a model of bytes that says neither ends nor ``UNKNOWN``, with its tokens in another order and
    ``unknown`` ones spelled otherwise.
    """
    model = copy.deepcopy(tiny.model)
    index = torch.tensor(order)
    with torch.no_grad():
        model.lm_head.weight[[*range(256, 260), *UNKNOWN]] = 0.0
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight.copy_(weight[index].clone())
    model.save_pretrained(folder)
    for file in tiny.folder.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    text = json.loads((folder / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"].items()
    text["model"]["vocab"] = {(word * 3 if n in unknown else word): order[n] for word, n in vocab}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    return Tiny(folder, model)


def test_vocabularies_without_a_common_token_are_refused(engine: Engine, text_model: Tiny, tmp_path: Path) -> None:
    draft = copied(text_model, tmp_path, list(range(260)), set(range(257)))
    text = (draft.folder / "tokenizer.json").read_text()
    (draft.folder / "tokenizer.json").write_text(text.replace("<end>", "<halt>"))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = draft.folder / name
        if path.is_file():
            path.write_text(path.read_text().replace("<end>", "<halt>"))
    with pytest.raises(ConfigError, match="no tokens in common") as caught:
        drafting(engine, text_model, draft, skip_tokenizer_init=False)
    assert caught.value.field == "speculative.model"
