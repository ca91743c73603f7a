"""Drafts that branch: on layers of every kind, grown by Medusa's heads and EAGLE's layer, and refused where they
cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import recurrent_models
import tiny_models
import torch
from engines import Engine, Models
from hf import random_prompts
from latent_models import RECIPES as LATENT
from speculation_drafters import Branching, Knowing
from test_speculation_eagle import Reference as EagleReference
from test_speculation_eagle import checkpoint
from test_speculation_eagle import target as target
from test_speculation_heads import HEADS, medusa, mlp_speculator

from jackfield import LLM, SamplingParams
from jackfield.errors import ConfigError, NoCandidateError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = random_prompts((3, 7, 18, 41))
KINDS: dict[str, Callable[[Path], Path]] = {
    "windows": lambda folder: tiny_models.RECIPES["starcoder2"].make(folder).folder,
    "linear biases": lambda folder: tiny_models.RECIPES["bloom"].make(folder).folder,
    "soft caps": lambda folder: tiny_models.RECIPES["gemma2"].make(folder).folder,
    "latents": lambda folder: LATENT["v3-dense"].make(folder).folder,
    "experts": lambda folder: LATENT["v2"].make(folder).folder,
}
Path_ = tuple[int, ...]
"""The tokens on the way to a draft, and its own."""


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def branching(count: int = 10) -> dict[str, Any]:
    return {
        "speculative.method": "branching",
        "speculative.num_speculative_tokens": count,
        "plugins": [Branching],
        "enable_prefix_caching": True,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes_and_what_is_kept_serves_others(engine: Engine, tmp_path: Path, kind: str) -> None:
    folder, shared = KINDS[kind](tmp_path), {"block_size": 4, "max_model_len": 128}
    plain = engine(folder, **shared)
    expected = tokens(plain)
    Knowing.texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    llm = engine(folder, **shared, **branching(), long_prefill_token_threshold=13)
    assert tokens(llm) == expected
    metrics = llm.get_metrics()
    assert metrics.drafts_accepted > 40 and metrics.drafts_proposed - metrics.drafts_accepted > 30
    # Blocks that drafts were moved in are prefixes of these.
    longer = [[*text, 5] for text in Knowing.texts]
    again = llm.generate(longer, GREEDY)
    assert all((output.num_cached_tokens or 0) >= len(text) - 8 for output, text in zip(again, longer, strict=True))
    assert [output.outputs[0].token_ids for output in again] == tokens(plain, longer)


def watch(llm: LLM) -> list[tuple[list[int], set[Path_]]]:
    """Return a list that fills with texts and the paths of the drafts behind them."""
    runner = llm._core._executor.worker._runner  # type: ignore[attr-defined]
    inner, tables = runner._speculation.propose, runner._parts.batch.tokens
    seen: list[tuple[list[int], set[Path_]]] = []

    def spy(slots: Any, lengths: Any, *rest: Any) -> Any:
        found = inner(slots, lengths, *rest)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            if found is not None and found[1] is not None:
                seen.append((tables[slot, :length].tolist(), set(paths(found[0][row], found[1][row]))))
        return found

    runner._speculation.propose = spy
    return seen


def paths(ids: Any, parents: Any) -> Iterator[Path_]:
    made: list[Path_] = []
    for token, parent in zip(ids.tolist(), parents.tolist(), strict=True):
        made.append((*(made[parent] if parent >= 0 else ()), token))
        if token >= 0:
            yield made[-1]


def grown(logits: Callable[[list[int]], torch.Tensor], width: int, depth: int) -> dict[Path_, float]:
    """Return all candidates of a dynamic tree with their values, the most valuable first; see ``tree_growth``."""
    candidates: dict[Path_, float] = {}
    tips: dict[Path_, float] = {(): 0.0}
    for _ in range(depth):
        level: dict[Path_, float] = {}
        for path, value in tips.items():
            best = logits(list(path)).log_softmax(-1).topk(width)
            level |= {(*path, int(t)): value + float(v) for t, v in zip(best.indices, best.values, strict=True)}
        candidates |= level
        tips = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    return dict(sorted(candidates.items(), key=lambda item: -item[1]))


def check_trees(
    seen: list[tuple[list[int], set[Path_]]],
    logits: Callable[[list[int], list[int]], torch.Tensor],
    sizes: tuple[int, int, int],
) -> None:
    """Compare trees with those that the reference grows; where two values are equal but for rounding either may be
    drafted.
    """
    width, depth, count = sizes
    # Near the end of a sequence there is no room for all.
    whole = [one for one in seen if len(one[1]) == count]
    assert len(whole) > 20
    for text, found in [*whole[:8], *whole[-8:]]:
        wanted = grown(lambda path, text=text: logits(text, path), width, depth)  # type: ignore[misc]
        least = sorted(wanted.values(), reverse=True)[count - 1]
        assert {path for path, value in wanted.items() if value > least + 1e-3} <= found
        assert all(wanted[path] > least - 1e-3 for path in found)


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_heads_grow_their_likeliest_paths(engine: Engine, models: Models, tmp_path: Path, method: str) -> None:
    tiny = models["llama"]
    folder, reference = (medusa if method == "medusa" else mlp_speculator)(tmp_path / "draft")
    llm = engine(
        tiny.folder,
        **{
            "speculative.method": method,
            "speculative.model": str(folder),
            "speculative.num_speculative_tokens": 11,
            "plugins.options": {method: {"tree_width": 4}},
        },
    )
    seen = watch(llm)
    assert tokens(llm) == tokens(engine(tiny.folder))

    def logits(text: list[int], path: list[int]) -> torch.Tensor:
        hidden = tiny.model.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
        found: torch.Tensor = reference(hidden, [text[-1], *path], len(path))
        return found

    with torch.no_grad():
        check_trees(seen, logits, (4, HEADS, 11))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    "setup", [{}, {"block_size": 4, "num_blocks": 30, "kv_cache_memory": None, "max_model_len": 80}]
)
def test_a_layer_grows_its_likeliest_paths(
    engine: Engine, target: Any, tmp_path: Path, kind: str, setup: dict[str, Any]
) -> None:
    three = kind == "eagle3"
    folder, tensors = checkpoint(tmp_path / "draft", three=three, small_vocab=three)
    speculative = {
        "speculative.method": kind,
        "speculative.model": str(folder),
        "speculative.num_speculative_tokens": 9,
        "plugins.options": {kind: {"tree_width": 3, "tree_depth": 4}},
        "enable_prefix_caching": False,
    }
    llm = engine(target.folder, **speculative, **setup)
    seen = watch(llm)
    assert tokens(llm) == tokens(engine(target.folder))
    assert (llm.get_metrics().preemptions > 0) == bool(setup)
    reference = EagleReference(target, tensors, three=three)
    with torch.no_grad():
        check_trees(seen, reference.logits, (3, 4, 9))


def test_what_does_not_go_with_branches_is_refused(engine: Engine, models: Models, tmp_path: Path) -> None:
    folder = models["llama"].folder
    draft, _ = medusa(tmp_path / "draft")
    heads = {"speculative.method": "medusa", "speculative.model": str(draft)}
    heads |= {"plugins.options": {"medusa": {"tree_width": 4}}}
    with pytest.raises(ConfigError, match="there may be 63"):
        engine(folder, **heads, **{"speculative.num_speculative_tokens": 64})
    with pytest.raises(ConfigError, match="blocks are of chains"):
        engine(folder, **heads, **{"speculative.rejection_sample_method": "block"})
    with pytest.raises(ConfigError, match="branches are of a fixed number"):
        engine(folder, **heads, **{"speculative.adaptive": True})
    with pytest.raises(NoCandidateError, match="tree"):
        engine(folder, **heads, **{"attention.force": "triton_mla"})


def test_a_tree_that_has_no_room_to_grow_is_refused(engine: Engine, target: Any, tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "draft", three=True)
    speculative = {"speculative.method": "eagle3", "speculative.model": str(folder)}
    speculative |= {"speculative.num_speculative_tokens": 8, "plugins.options": {"eagle3": {"tree_width": 3}}}
    with pytest.raises(ConfigError, match="width 3 and depth 5 is grown from 12 drafts"):
        engine(target.folder, **speculative)
    with pytest.raises(ConfigError, match="drafts in a chain have no levels") as caught:
        engine(target.folder, **{**speculative, "plugins.options": {"eagle3": {"tree_depth": 3}}})
    assert caught.value.field == "plugins.options.eagle3.tree_depth"


def test_states_cannot_branch(engine: Engine, tmp_path: Path) -> None:
    tiny = recurrent_models.RECIPES["mamba"].make(tmp_path)
    with pytest.raises(NoCandidateError, match="tree"):
        engine(tiny.folder, **branching())
