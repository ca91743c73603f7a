"""Drafters whose modules read the target's hidden states, on random checkpoints in the published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines import Engine, Models
from hf import random_prompts
from safetensors.torch import save_file
from speculation_drafters import RECORDED, watch

from jackfield import LLM, SamplingParams
from jackfield.errors import CheckpointError, ConfigError, NoCandidateError

WIDTH, VOCAB, HEADS, INNER = 64, 260, 3, 24
PROMPTS = random_prompts((3, 7, 18, 41))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
Tensors = dict[str, torch.Tensor]
Reference = Callable[[torch.Tensor, list[int], int], torch.Tensor]
"""(the target's hidden state [E], last token and drafts so far, place) to logits [V]."""


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def save(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def medusa(folder: Path, *, depth: int = 1, one_head: bool = False, start: str = "", bias: bool = False) -> Any:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for layer in range(depth):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (WIDTH, WIDTH)
            if bias:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (WIDTH,)
        if not one_head:
            shapes[f"lm_heads.{head}.weight"] = (VOCAB, WIDTH)
    if one_head:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    tensors = random_tensors(shapes)
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": WIDTH, "vocab_size": VOCAB}
    config |= {"num_heads": HEADS, "num_hidden_layers": depth, "original_lm_head": one_head, "medusa_fc_bias": bias}
    save(folder, config, {start + name: tensor for name, tensor in tensors.items()})

    def reference(hidden: torch.Tensor, tokens: list[int], place: int) -> torch.Tensor:
        x = hidden
        for layer in range(depth):
            name = f"blocks.{place}.layers.{layer}"
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")))
        return F.linear(x, tensors["lm_head.weight" if one_head else f"lm_heads.{place}.weight"])

    return folder, reference


def mlp_speculator(
    folder: Path, *, tied: bool = False, scaled: bool = True, start: str = "", repeat: bool = True
) -> Any:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        shapes[f"emb.{head}.weight"] = (VOCAB, INNER)
        shapes[f"proj.{head}.weight"] = (INNER, WIDTH if head == 0 else INNER)
        shapes[f"ln.{head}.weight"] = shapes[f"ln.{head}.bias"] = (INNER,)
        shapes[f"head.{head}.weight"] = (VOCAB, INNER)
    tensors = random_tensors(shapes)
    if tied:
        for name in list(tensors):
            part, head, suffix = name.split(".")
            own = min(int(head), 1) if part == "proj" else 0
            tensors[name] = tensors[f"{part}.{own}.{suffix}"].clone()
    config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_predict": HEADS}
    config |= {"emb_dim": WIDTH, "inner_dim": INNER, "vocab_size": VOCAB, "tie_weights": tied, "scale_input": scaled}
    config |= {"n_candidates": 5, "top_k_tokens_per_head": [5, 4, 3]}
    kept = tensors
    if not repeat:
        kept = {n: t for n, t in tensors.items() if n.split(".")[1] == "0" or n.startswith("proj.1.")}
    save(folder, config, {start + name: tensor for name, tensor in kept.items()})

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean() + 1e-6).sqrt()

    def reference(hidden: torch.Tensor, tokens: list[int], place: int) -> torch.Tensor:
        state = norm(hidden) / 2**0.5 if scaled else hidden
        weight = 0.5 ** (0.5 / HEADS)
        emb_weight = ((1 - weight**2) * INNER / 2) ** 0.5
        for head in range(place + 1):
            z = tensors[f"emb.{head}.weight"][tokens[head]]
            state = F.linear(state, tensors[f"proj.{head}.weight"]) + emb_weight / weight * z
            state = F.gelu(norm(state) * tensors[f"ln.{head}.weight"] + tensors[f"ln.{head}.bias"])
        return F.linear(state, tensors[f"head.{place}.weight"])

    return folder, reference


CASES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "medusa": ("medusa", medusa),
    "medusa, deeper": ("medusa", lambda f: medusa(f, depth=2, bias=True, start="medusa_heads.")),
    "medusa, one head": ("medusa", lambda f: medusa(f, one_head=True)),
    "mlp": ("mlp_speculator", mlp_speculator),
    "mlp, tied": ("mlp_speculator", lambda f: mlp_speculator(f, tied=True, scaled=False, start="speculator.")),
    "mlp, tied, saved once": ("mlp_speculator", lambda f: mlp_speculator(f, tied=True, repeat=False)),
}


def drafting(engine: Engine, target: Path, method: str, draft: Path, **settings: Any) -> LLM:
    speculative = {"speculative.method": method, "speculative.model": str(draft)}
    speculative |= {"speculative.num_speculative_tokens": HEADS, "speculative.adaptive": False}
    return engine(target, **{**speculative, **settings})


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        *((case, {}) for case in CASES),
        *((case, RECORDED) for case in ("medusa, deeper", "medusa, one head", "mlp, tied")),
    ],
)
def test_heads_say_what_the_reference_says_and_change_no_token(
    engine: Engine, models: Models, tmp_path: Path, case: str, settings: dict[str, Any]
) -> None:
    target = models["llama"]
    method, make = CASES[case]
    folder, reference = make(tmp_path / "draft")
    llm = drafting(engine, target.folder, method, folder, **settings)
    seen = watch(llm)
    assert tokens(llm) == tokens(engine(target.folder))
    compared = 0
    for text, drafts in seen:
        with torch.no_grad():
            hidden = target.model.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
        for place, draft in enumerate(drafts):
            logits = reference(hidden, [text[-1], *drafts[:place]], place)
            assert float(logits.max() - logits[draft]) < 1e-3 * float(logits.std()), (case, place)
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_chunks_preemption_and_company_change_nothing(
    engine: Engine, models: Models, tmp_path: Path, method: str
) -> None:
    folder, _ = {"medusa": medusa, "mlp_speculator": mlp_speculator}[method](tmp_path / "draft")
    expected = tokens(engine(models["llama"].folder))
    hard = {"block_size": 4, "num_blocks": 24, "kv_cache_memory": None, "max_model_len": 80}
    llm = drafting(engine, models["llama"].folder, method, folder, long_prefill_token_threshold=5, **hard)
    assert tokens(llm) == expected
    assert llm.get_metrics().preemptions > 0


def test_more_drafts_than_heads_are_refused(engine: Engine, models: Models, tmp_path: Path) -> None:
    folder, _ = medusa(tmp_path / "draft")
    with pytest.raises(ConfigError, match="the checkpoint has 3 heads") as caught:
        drafting(engine, models["llama"].folder, "medusa", folder, **{"speculative.num_speculative_tokens": 4})
    assert caught.value.field == "speculative.num_speculative_tokens"


def test_heads_over_a_part_of_the_vocabulary_are_refused(engine: Engine, models: Models, tmp_path: Path) -> None:
    folder, _ = medusa(tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "truncated_vocab_size": 100}))
    with pytest.raises(CheckpointError, match="a part of the vocabulary") as caught:
        drafting(engine, models["llama"].folder, "medusa", folder)
    assert caught.value.value == 100


@pytest.mark.parametrize(("key", "name"), [("hidden_size", "hidden size"), ("vocab_size", "vocabulary")])
def test_a_checkpoint_for_another_target_is_refused(
    engine: Engine, models: Models, tmp_path: Path, key: str, name: str
) -> None:
    sizes = {"hidden_size": WIDTH, "vocab_size": VOCAB, key: 32}
    width, vocab = sizes["hidden_size"], sizes["vocab_size"]
    shapes = {"blocks.0.layers.0.weight": (width, width), "lm_heads.0.weight": (vocab, width)}
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 1, **sizes}
    folder = save(tmp_path / "draft", config, random_tensors(shapes))
    with pytest.raises(ConfigError, match=f"a target whose {name} is 32"):
        drafting(engine, models["llama"].folder, "medusa", folder, **{"speculative.num_speculative_tokens": 1})


def test_heads_cannot_be_served_alone(engine: Engine, tmp_path: Path) -> None:
    folder, _ = medusa(tmp_path / "draft")
    with pytest.raises(NoCandidateError, match="it drafts for another model") as caught:
        engine(folder)
    assert "speculative.model" in str(caught.value)
