"""With every drafter that has a checkpoint, and every option, a request gets what it gets without.

Drafts are certain here (``draft_sample_method: greedy``): then a seed gives what it gives without. Drafts that are
drawn are held against the distribution, in tests/unit/spec_decode/test_verification.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine
from hf import Tiny, make_tiny
from test_speculation_eagle import checkpoint
from test_speculation_heads import medusa, mlp_speculator
from test_speculation_options import LENGTH, answers, assert_same
from test_speculation_parallel import DFLASH, EAGLE, dflash_tensors, eagle_tensors, save

from jackfield import LLM

TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
READ = {"dflash_config": {"mask_token_id": 259, "target_layer_ids": [0, 1, 2]}, "num_target_layers": 3}


def eagle(folder: Path, *, three: bool) -> Path:
    """Return a checkpoint that looks at layers which a small target has."""
    made, _ = checkpoint(folder, three=three)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, **(TAPS if three else {})}))
    return made


def small(folder: Path) -> Path:
    return make_tiny(folder, "llama", hidden_size=32, num_hidden_layers=1, head_dim=16, num_attention_heads=2).folder


def p_eagle(folder: Path) -> Path:
    return save(folder, {**EAGLE, **TAPS}, eagle_tensors(EAGLE))


def dflash(folder: Path) -> Path:
    config = {**DFLASH, **READ}
    return save(folder, config, dflash_tensors(config))


TREE: dict[str, Any] = {"tree_width": 2}
GROWN: dict[str, Any] = {"tree_width": 2, "tree_depth": 2}
CASES: dict[str, tuple[str, Callable[[Path], Path], dict[str, Any]]] = {
    "draft_model": ("draft_model", small, {}),
    "medusa": ("medusa", lambda folder: medusa(folder)[0], {}),
    "medusa, tree": ("medusa", lambda folder: medusa(folder)[0], TREE),
    "mlp_speculator": ("mlp_speculator", lambda folder: mlp_speculator(folder)[0], {}),
    "eagle": ("eagle", lambda folder: eagle(folder, three=False), {}),
    "eagle, tree": ("eagle", lambda folder: eagle(folder, three=False), GROWN),
    "eagle3": ("eagle3", lambda folder: eagle(folder, three=True), {}),
    "eagle3, tree": ("eagle3", lambda folder: eagle(folder, three=True), GROWN),
    "eagle3, one pass": ("eagle3", p_eagle, {}),
    "dflash": ("dflash", dflash, {}),
}


@pytest.fixture(scope="module")
def expected(text_model: Tiny) -> Iterator[list[Any]]:
    """Return what an engine without drafts says."""
    llm = LLM(str(text_model.folder), max_model_len=LENGTH, max_num_seqs=16, kv_cache_memory="16MiB")
    yield answers(llm)
    llm.shutdown()


def drafting(engine: Engine, target: Path, method: str, draft: Path, options: dict[str, Any]) -> LLM:
    settings: dict[str, Any] = {
        "speculative.method": method,
        "speculative.model": str(draft),
        "speculative.num_speculative_tokens": 3,
        "speculative.draft_sample_method": "greedy",
        "max_model_len": LENGTH,
        "skip_tokenizer_init": False,
    }
    if options:
        return engine(target, **settings, **{"plugins.options": {method: options}})
    return engine(target, **settings, **{"speculative.adaptive": False})


@pytest.mark.parametrize("name", CASES)
def test_every_option_gives_what_it_gives_without_drafts(
    engine: Engine, text_model: Tiny, expected: list[Any], tmp_path: Path, name: str
) -> None:
    method, make, options = CASES[name]
    llm = drafting(engine, text_model.folder, method, make(tmp_path / "draft"), options)
    assert_same(answers(llm), expected)
    metrics = llm.get_metrics()
    assert metrics.drafts_proposed > 100
    assert metrics.drafts_accepted < metrics.drafts_proposed, "nothing was refused"


def test_drafts_of_the_target_itself_are_kept_with_every_option(
    engine: Engine, text_model: Tiny, expected: list[Any], tmp_path: Path
) -> None:
    """Long runs of kept drafts are as harmless as refused ones. Options that edit logits still refuse many."""
    shutil.copytree(text_model.folder, tmp_path / "draft")
    llm = drafting(engine, text_model.folder, "draft_model", tmp_path / "draft", {})
    assert_same(answers(llm), expected)
    metrics = llm.get_metrics()
    assert 300 < metrics.drafts_accepted < metrics.drafts_proposed
