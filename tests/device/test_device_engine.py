"""The whole engine on the device against the engine on the CPU in float32, on a tiny model with random weights."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from jackfield import LLM, SamplingParams
from jackfield.engine.outputs import RequestOutput

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=3)
Engine = Callable[..., LLM]


def weights() -> dict[str, torch.Tensor]:
    """Return random weights that are large enough for attention to matter."""
    rng = torch.Generator().manual_seed(0)
    width, inner, heads, kv = 256, 512, 8 * 64, 2 * 64

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng) * columns**-0.5

    found = {"model.embed_tokens.weight": matrix(1024, width), "lm_head.weight": matrix(1024, width) * 4}
    found["model.norm.weight"] = torch.ones(width)
    for i in range(3):
        at = f"model.layers.{i}"
        sizes = {"q": (heads, width), "k": (kv, width), "v": (kv, width), "o": (width, heads)}
        found |= {f"{at}.self_attn.{n}_proj.weight": matrix(*size) for n, size in sizes.items()}
        found |= {f"{at}.mlp.{n}_proj.weight": matrix(inner, width) for n in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = matrix(width, inner)
        found |= {f"{at}.{n}.weight": torch.ones(width) for n in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{at}.self_attn.{n}_norm.weight": torch.ones(64) for n in ("q", "k")}
    return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors")

    def start(**settings: Any) -> LLM:
        base = {"skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": 24, "kv_cache_memory": "256MiB"}
        return LLM(str(folder), **{**base, **settings})

    return start


def prompts() -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [{"prompt_token_ids": rng.choices(range(1024), k=rng.choice([1, 5, 40, 130, 300]))} for _ in range(40)]


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> list[RequestOutput]:
    return engine(platform="cpu", dtype="float32").generate(prompts(), PARAMS)


def disagreements(found: list[RequestOutput], wanted: list[RequestOutput], tie: float) -> tuple[int, float]:
    """Return how many requests part where the reference had no tie, and the largest error of a log probability
    before that.
    """
    wrong, error = 0, 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        a, b = ours.outputs[0], theirs.outputs[0]
        assert a.logprobs is not None and b.logprobs is not None
        for token, other, mine, right in zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True):
            if token != other:
                best = sorted((entry.logprob for entry in right.values()), reverse=True)
                wrong += best[0] - right[token].logprob > tie if token in right else True
                break
            error = max(error, abs(mine[token].logprob - right[token].logprob))
    return wrong, error


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 64},
        {"async_scheduling": False},
        {"attention": "flash_attn", "dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"num_blocks": 40, "block_size": 16},
    ],
    ids=["recorded", "chunks", "plain loop", "flash_attn", "bfloat16", "preemption"],
)
def test_tokens_and_log_probabilities_are_those_of_the_cpu(
    engine: Engine, wanted: list[RequestOutput], settings: dict[str, Any]
) -> None:
    llm = engine(**{"dtype": "float32", **settings})
    assert llm.report.summary().startswith("cuda")
    narrow = settings.get("dtype") == "bfloat16"
    wrong, error = disagreements(llm.generate(prompts(), PARAMS), wanted, 0.15 if narrow else 1e-3)
    assert wrong == 0
    assert error < (0.15 if narrow else 2e-3)
    llm._core.scheduler.check_idle()


def test_sampled_requests_do_not_depend_on_their_batch(engine: Engine) -> None:
    llm = engine(dtype="float32", enable_prefix_caching=False)
    params = [
        SamplingParams(temperature=0.8, top_k=k, top_p=p, seed=s, max_tokens=12, ignore_eos=True, detokenize=False)
        for s, (k, p) in enumerate([(0, 1.0), (20, 1.0), (0, 0.9), (50, 0.8)] * 3)
    ]
    together = llm.generate(prompts()[:12], params)
    alone = [llm.generate([p], [s])[0] for p, s in zip(prompts()[:12], params, strict=True)]
    same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(together, alone, strict=True))
    # Products of other sizes round otherwise, so a draw at the border between two tokens may fall to the other.
    assert same >= 11


@pytest.mark.parametrize("scored", [False, True], ids=["launched ahead", "one by one"])
@pytest.mark.parametrize("count", [1, 5, 24])
def test_recorded_rounds_give_the_tokens_of_the_cpu(engine: Engine, count: int, scored: bool) -> None:
    """Prompt lookup, verified and drafted in recordings; log probabilities keep rounds from being launched ahead."""
    rng = random.Random(count)
    texts = [{"prompt_token_ids": rng.choices(range(1024), k=rng.choice([3, 8, 30])) * 4} for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False, logprobs=3)
    wanted = engine(platform="cpu", dtype="float32").generate(texts, params)
    speculative = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    settings = {f"speculative.{name}": value for name, value in speculative.items()}
    llm = engine(dtype="float32", **settings, **{"plugins.options.ngram.min_n": 1})
    executor: Any = llm._core._executor
    assert executor.worker._runner._parts.rounds.drafts and llm._core._overlapped
    if scored:
        wrong, error = disagreements(llm.generate(texts, params), wanted, 1e-3)
        assert wrong == 0 and error < 2e-3
    else:
        plain = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
        for ours, theirs in zip(llm.generate(texts, plain), wanted, strict=True):
            found, right = list(ours.outputs[0].token_ids), list(theirs.outputs[0].token_ids)
            assert found == right or _parts_at_a_tie(found, theirs)
    metrics = llm.get_metrics()
    assert metrics.draft_rounds > 0 and metrics.drafts_accepted > 0
    llm._core.scheduler.check_idle()


def _parts_at_a_tie(found: list[int], wanted: RequestOutput) -> bool:
    """Return whether the first other token was as likely, but for rounding."""
    right, scores = wanted.outputs[0].token_ids, wanted.outputs[0].logprobs
    assert scores is not None
    at = next(place for place, (mine, theirs) in enumerate(zip(found, right, strict=True)) if mine != theirs)
    entry = scores[at].get(found[at])
    return entry is not None and scores[at][right[at]].logprob - entry.logprob < 1e-3
