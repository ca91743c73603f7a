"""Dual-chunk attention beyond one chunk against the definition over whole sequences, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from hf import Tiny, assert_equal, assert_logprobs, changed_copy, make_tiny, random_prompts
from transformers import AttentionInterface
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from jackfield import LLM, SamplingParams
from jackfield.errors import CheckpointError, JackfieldError

GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
CHUNK, REACH, ORIGINAL = 20, 28, 50
SIZES: dict[str, Any] = {
    "chunk_size": REACH,
    "local_size": REACH - CHUNK,
    "original_max_position_embeddings": ORIGINAL,
}
LENGTHS = (7, 19, 20, 21, 45, 130)


class Definition:
    """Attention of whole sequences: the distance of each pair, and nothing else, says how they are rotated."""

    def __init__(self, frequencies: torch.Tensor, sizes: dict[str, Any]) -> None:
        self.frequencies = frequencies.double()
        self.chunk = sizes["chunk_size"] - sizes["local_size"]
        self.reach, self.original = sizes["chunk_size"], sizes["original_max_position_embeddings"]

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions.double().unsqueeze(-1) * self.frequencies
        low, high = x.double().chunk(2, -1)
        return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)

    def __call__(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any, **values: Any) -> Any:
        """Return [B, T, H, D]; queries and keys [B, H, T, D] are not rotated yet."""
        count = q.shape[2]
        places = torch.arange(count)
        local = places % self.chunk
        k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        keys = self.turned(k, local)
        seen_from = (
            local,
            (local + self.chunk).clamp(max=self.reach),
            torch.full_like(local, min(2 * self.chunk - 1, self.reach)),
        )
        by_kind = torch.stack([self.turned(q, position) @ keys.transpose(2, 3) for position in seen_from])
        apart = (places[:, None] // self.chunk - places[None, :] // self.chunk).clamp(0, 2)
        scores = by_kind.gather(0, apart.expand(1, *by_kind.shape[1:]))[0] * module.scaling
        if self.original:
            longer = torch.tensor([max(1.0, 0.1 * math.log(t / self.original) + 1) for t in range(1, count + 1)])
            scores = scores * longer.double().square()[:, None]
        scores = scores.masked_fill(places[:, None] < places[None, :], float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).float(), None


@pytest.fixture
def unturned(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (modeling_qwen2, modeling_qwen3):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))


@pytest.fixture
def chunked(tmp_path: Path) -> Iterator[Any]:
    """Make tiny models with dual-chunk attention; the reference learns it too."""

    def make(kind: str = "qwen2", **sizes: Any) -> Tiny:
        known = {**SIZES, **sizes}
        tiny = make_tiny(tmp_path / "model", kind)
        folder = Path(changed_copy(tiny.folder, tmp_path / "chunks", dual_chunk_attention_config=known))
        AttentionInterface.register("chunked", Definition(tiny.model.model.rotary_emb.inv_freq, known))
        tiny.model.set_attn_implementation("chunked")
        return Tiny(folder, tiny.model)

    yield make
    AttentionInterface._global_mapping.pop("chunked", None)


def attention_of(llm: LLM) -> set[str]:
    return {decision.chosen.name for decision in llm.report.decisions if decision.family == "attention_backends"}


def outputs(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(request.outputs[0].token_ids) for request in llm.generate(prompts, GREEDY)]


@pytest.mark.usefixtures("unturned")
@pytest.mark.parametrize("step", [1, 7, 64])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_chunks_of_prefill_change_nothing(engine: Engine, chunked: Any, kind: str, step: int) -> None:
    tiny = chunked(kind)
    prompts = random_prompts(LENGTHS if step > 1 else LENGTHS[-2:])
    llm = engine(tiny.folder, block_size=8, long_prefill_token_threshold=step)
    assert_equal(tiny.model, prompts, outputs(llm, prompts))
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=5, ignore_eos=True)
    assert_logprobs(tiny.model, prompts[-1], llm.generate([prompts[-1]], params)[0].outputs[0], 5)


@pytest.mark.usefixtures("unturned")
@pytest.mark.parametrize(
    "sizes",
    [
        {"local_size": 0},
        {"chunk_size": 300, "local_size": 299},
        {"chunk_size": 90, "local_size": 40, "original_max_position_embeddings": 0},
    ],
    ids=["nothing is local", "chunks of one token", "no factor"],
)
def test_other_sizes(engine: Engine, chunked: Any, sizes: dict[str, int]) -> None:
    tiny = chunked(**sizes)
    prompts = random_prompts((33, 120))
    assert_equal(tiny.model, prompts, outputs(engine(tiny.folder, block_size=16), prompts))


@pytest.mark.usefixtures("unturned")
def test_prefixes_and_preemption_change_nothing(engine: Engine, chunked: Any) -> None:
    tiny = chunked()
    shared = random_prompts((48,), seed=8)[0]
    prompts = [shared + rest for rest in random_prompts((1, 9, 40, 70), seed=9)]
    llm = engine(tiny.folder, block_size=8)
    first = outputs(llm, prompts)
    assert_equal(tiny.model, prompts, first)
    again = llm.generate(prompts, GREEDY)
    assert [request.num_cached_tokens for request in again] == [48, 56, 80, 112]
    assert [list(request.outputs[0].token_ids) for request in again] == first
    small = engine(tiny.folder, block_size=8, num_blocks=27, max_model_len=150, enable_prefix_caching=False)
    assert outputs(small, prompts) == first
    assert small._core.scheduler.counters.preemptions > 0


@pytest.mark.usefixtures("unturned")
def test_drafts_are_verified_across_edges(engine: Engine, chunked: Any) -> None:
    tiny = chunked()
    prompts = [(ids * 9)[:57] for ids in random_prompts((9, 5), seed=2)]
    llm = engine(tiny.folder, block_size=8, **{"speculative.method": "ngram", "speculative.num_speculative_tokens": 4})
    assert_equal(tiny.model, prompts, outputs(llm, prompts))


def test_texts_of_one_chunk_are_attention_as_usual(engine: Engine, tmp_path: Path) -> None:
    """They need no dual chunks: any backend may serve them, and the numbers are those of the plain model."""
    tiny = make_tiny(tmp_path / "model", "qwen2")
    sizes = {"chunk_size": 128, "local_size": 28, "original_max_position_embeddings": 128}
    folder = Path(changed_copy(tiny.folder, tmp_path / "chunks", dual_chunk_attention_config=sizes))
    prompts = random_prompts((7, 60, 86))
    short, long = engine(folder, block_size=8, max_model_len=100), engine(folder, block_size=8)
    for llm in (short, long):
        assert_equal(tiny.model, prompts, outputs(llm, prompts))
    plain = engine(tiny.folder, max_model_len=100)
    assert attention_of(short) == attention_of(plain) != attention_of(long) == {"torch_sdpa"}
    assert any("needs dual_chunk for texts of up to 512 tokens" in note for note in long.report.notes)
    assert not any("dual_chunk" in note for note in short.report.notes)


def test_backends_that_cannot_are_rejected(engine: Engine, chunked: Any) -> None:
    folder = chunked().folder
    with pytest.raises(JackfieldError, match="does not declare the feature 'dual_chunk'"):
        engine(folder, **{"attention.force": "native_cpu"})


def test_sparse_prefill_is_refused_by_name(engine: Engine, chunked: Any) -> None:
    """It is another computation, which no backend does; told to do without, or for short texts, the model runs."""
    sparse = {"sparse_attention_config": [{"0": ["vertical_and_slash", 1000, 6096, 1]}] * 3}
    folder = chunked(**sparse, sparse_attention_threshold=100).folder
    with pytest.raises(JackfieldError, match="does not declare the feature 'sparse_prefill'"):
        engine(folder)
    engine(folder, max_model_len=100)
    off = {"dual_chunk_attention_config": {**SIZES, **sparse, "sparse_attention_enabled": False}}
    engine(folder, **{"model.hf_overrides": off})


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"dual_chunk_attention_config": {**SIZES, "local_size": REACH}}, "must be larger than what is local"),
        ({"dual_chunk_attention_config": {"chunk_size": REACH}}, "local_size"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 3},
            "sliding windows",
        ),
    ],
)
def test_configurations_that_mean_nothing_are_refused(
    engine: Engine, tmp_path: Path, keys: dict[str, Any], match: str
) -> None:
    tiny = make_tiny(tmp_path / "model", "qwen2")
    wrong = changed_copy(tiny.folder, tmp_path / "wrong", **{"dual_chunk_attention_config": SIZES, **keys})
    with pytest.raises(CheckpointError, match=match):
        engine(Path(wrong))
