"""Drafters that make all drafts in one pass, P-EAGLE and DFlash: random checkpoints in the published layouts against
straightforward references.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines import Engine
from hf import Tiny, make_tiny, random_prompts
from safetensors.torch import save_file
from speculation_drafters import RECORDED, watch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from jackfield import LLM, SamplingParams
from jackfield.errors import CheckpointError, ConfigError

WIDTH, VOCAB, INNER, HEADS, KV, SIZE, DRAFT_VOCAB = 64, 260, 80, 4, 2, 16, 100
LAYERS, MASK, DRAFTS, LONGEST = 2, 259, 3, 80
PROMPTS = random_prompts((3, 7, 18, 41))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
Tensors = dict[str, torch.Tensor]
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
EAGLE: dict[str, Any] = {
    **CONFIG,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "draft_vocab_size": DRAFT_VOCAB,
    "ptd_token_id": MASK,
}
DFLASH: dict[str, Any] = {
    **CONFIG,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 8,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4, 6]},
    "layer_types": ["full_attention"] * LAYERS,
    "max_window_layers": LAYERS,
    "num_target_layers": 8,
    "sliding_window": None,
    "use_sliding_window": False,
}
WINDOWS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
LIBRARY: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy"},
    "transformer_layer_config": {
        **{key: value for key, value in DFLASH.items() if key in CONFIG or key in WINDOWS},
    },
    "aux_hidden_state_layer_ids": [2, 5, 7],
    "block_size": 8,
    "draft_vocab_size": DRAFT_VOCAB,
    "mask_token_id": MASK,
    "projector_type": "dflash",
    "sample_from_anchor": False,
    "shift_label": False,
    "sliding_window_non_causal": False,
}
"""DFlash as the speculators library saves it."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=8, hidden_size=WIDTH)


def layer_shapes(layer: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.self_attn.q_proj.weight": (HEADS * SIZE, width),
        f"{layer}.self_attn.k_proj.weight": (KV * SIZE, width),
        f"{layer}.self_attn.v_proj.weight": (KV * SIZE, width),
        f"{layer}.self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        f"{layer}.mlp.gate_proj.weight": (INNER, WIDTH),
        f"{layer}.mlp.up_proj.weight": (INNER, WIDTH),
        f"{layer}.mlp.down_proj.weight": (WIDTH, INNER),
        f"{layer}.input_layernorm.weight": (WIDTH,),
        f"{layer}.post_attention_layernorm.weight": (WIDTH,),
    }


def eagle_tensors(config: dict[str, Any]) -> Tensors:
    shapes = {"fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,), "lm_head.weight": (DRAFT_VOCAB, WIDTH)}
    shapes |= layer_shapes("midlayer", 2 * WIDTH) | {"midlayer.hidden_norm.weight": (WIDTH,)}
    for index in range(1, config["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{index}", WIDTH)
    if "ptd_token_id" in config:
        shapes |= {"mask_hidden": (1, 1, 3 * WIDTH), "embed_tokens.weight": (VOCAB, WIDTH)}
    if "pard_token" in config:
        shapes |= {"mask_hidden": (1, 3 * WIDTH), "embed_tokens.weight": (VOCAB, WIDTH)}
    return drawn(shapes) | some_tokens()


def dflash_tensors(config: dict[str, Any]) -> Tensors:
    taps = config.get("aux_hidden_state_layer_ids") or config["dflash_config"]["target_layer_ids"]
    shapes = {"fc.weight": (WIDTH, len(taps) * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    for index in range(config.get("num_hidden_layers", LAYERS)):
        shapes |= layer_shapes(f"layers.{index}", WIDTH)
        shapes |= {f"layers.{index}.self_attn.{part}_norm.weight": (SIZE,) for part in "qk"}
    if config.get("draft_vocab_size") == DRAFT_VOCAB:
        return drawn(shapes | {"lm_head.weight": (DRAFT_VOCAB, WIDTH)}) | some_tokens()
    return drawn(shapes)


def some_tokens() -> Tensors:
    """Return which tokens a head knows."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": known}


def drawn(shapes: dict[str, Any]) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    return tensors | {name: 1.0 + tensor for name, tensor in tensors.items() if "norm" in name}


def save(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


class Reference:
    """What both have in common, over a whole sequence at once."""

    def __init__(self, target: Tiny, config: dict[str, Any], tensors: Tensors) -> None:
        self.target, self.config, self.w = target.model, config, tensors
        self.rotary = LlamaRotaryEmbedding(self.target.config)
        self.rotary.inv_freq = 10000.0 ** (-torch.arange(0, SIZE, 2).float() / SIZE)

    def features(self, text: list[int], behind: list[int]) -> torch.Tensor:
        """Return the fused states of a text behind so many layers each."""
        out = self.target.model(torch.tensor([text]), output_hidden_states=True)
        return F.linear(torch.cat([out.hidden_states[i][0] for i in behind], -1), self.w["fc.weight"])

    def attention(self, layer: str, x: torch.Tensor, context: torch.Tensor, *, causal: bool) -> torch.Tensor:
        """Return what ``x`` takes from ``context``, of which it is the last part."""
        name, start = f"{layer}.self_attn", len(context) - len(x)
        parts = []
        for part, given in (("q", x), ("k", context), ("v", context)):
            heads = F.linear(given, self.w[f"{name}.{part}_proj.weight"]).view(len(given), -1, SIZE)
            if f"{name}.{part}_norm.weight" in self.w:
                heads = rms(heads, self.w[f"{name}.{part}_norm.weight"])
            parts.append(heads.transpose(0, 1)[None])
        cos, sin = self.rotary(x, torch.arange(len(context))[None])
        q, _ = apply_rotary_pos_emb(parts[0], parts[0], cos[:, start:], sin[:, start:])
        _, k = apply_rotary_pos_emb(parts[1], parts[1], cos, sin)
        k, v = k.repeat_interleave(HEADS // KV, 1), parts[2].repeat_interleave(HEADS // KV, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return F.linear(out[0].transpose(0, 1).flatten(1), self.w[f"{name}.o_proj.weight"])

    def mlp(self, layer: str, stream: torch.Tensor) -> torch.Tensor:
        inner = rms(stream, self.w[f"{layer}.post_attention_layernorm.weight"])
        gate, up = (F.linear(inner, self.w[f"{layer}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        return stream + F.linear(F.silu(gate) * up, self.w[f"{layer}.mlp.down_proj.weight"])

    def by_own_head(self, states: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(states), VOCAB), float("-inf"))
        logits[:, torch.arange(DRAFT_VOCAB) + self.w["d2t"]] = F.linear(states, self.w["lm_head.weight"])
        return logits

    def logits(self, text: list[int], count: int) -> torch.Tensor:
        """Return [K, V] logits of the drafts behind a text."""
        raise NotImplementedError


class PEagle(Reference):
    def logits(self, text: list[int], count: int) -> torch.Tensor:
        unknown = F.linear(self.w["mask_hidden"].view(1, -1), self.w["fc.weight"])
        features = torch.cat((self.features(text[:-1], [2, 4, 5]), unknown.repeat(count - 1, 1)))
        embeds = F.embedding(torch.tensor(text[1:] + [MASK] * (count - 1)), self.w["embed_tokens.weight"])
        normed = rms(features, self.w["midlayer.hidden_norm.weight"])
        x = torch.cat((rms(embeds, self.w["midlayer.input_layernorm.weight"]), normed), -1)
        stream = normed if self.config.get("norm_before_residual") else features
        for index in range(self.config["num_hidden_layers"]):
            layer = f"layers.{index}" if index else "midlayer"
            x = rms(stream, self.w[f"{layer}.input_layernorm.weight"]) if index else x
            stream = self.mlp(layer, stream + self.attention(layer, x, x, causal=True))
        return self.by_own_head(rms(stream[-count:], self.w["norm.weight"]))


class DFlash(Reference):
    def logits(self, text: list[int], count: int) -> torch.Tensor:
        context = rms(self.features(text[:-1], [2, 5, 7]), self.w["hidden_norm.weight"])
        masks = min(DRAFTS, LONGEST - len(text))
        x = self.target.model.embed_tokens(torch.tensor([text[-1]] + [MASK] * masks))
        for index in range(LAYERS):
            layer = f"layers.{index}"
            normed = rms(x, self.w[f"{layer}.input_layernorm.weight"])
            seen = torch.cat((context, normed))
            x = self.mlp(layer, x + self.attention(layer, normed, seen, causal=False))
        states = rms(x[1 : 1 + count], self.w["norm.weight"])
        return self.by_own_head(states) if "d2t" in self.w else self.target.lm_head(states)


def drafting(engine: Engine, target: Tiny, method: str, draft: Path, **settings: Any) -> LLM:
    speculative = {"speculative.method": method, "speculative.model": str(draft)}
    speculative |= {"speculative.num_speculative_tokens": DRAFTS, "speculative.adaptive": False}
    return engine(target.folder, **{**speculative, "max_model_len": LONGEST, **settings})


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", EAGLE),
    "eagle3, one layer": ("eagle3", {**EAGLE, "num_hidden_layers": 1}),
    "eagle3, normed": ("eagle3", {**EAGLE, "ptd_token_id": None, "pard_token": MASK, "norm_before_residual": True}),
    "dflash": ("dflash", DFLASH),
    "dflash of the library": ("dflash", LIBRARY),
    "dflash of the library, all tokens": ("dflash", {**LIBRARY, "draft_vocab_size": VOCAB}),
}
FEW: dict[str, Any] = {"block_size": 4, "num_blocks": 24, "kv_cache_memory": None}
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"long_prefill_token_threshold": 5, "block_size": 4},
    "full steps": {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4},
    "few blocks": FEW,
    "rounds": RECORDED,
    "rounds, few blocks": {**RECORDED, **FEW},
}
QUICK = (
    *(("eagle3", "few blocks"), ("eagle3", "rounds"), ("eagle3", "full steps"), ("eagle3, normed", "chunks")),
    *(("dflash", "chunks"), ("dflash", "rounds, few blocks"), ("dflash", "full steps")),
    *(("dflash of the library", "chunks"), ("dflash of the library", "rounds")),
    ("dflash of the library, all tokens", "chunks"),
)


def made(folder: Path, kind: str) -> tuple[str, dict[str, Any], Tensors, Path]:
    method, config = KINDS[kind]
    config = {name: value for name, value in config.items() if value is not None or name == "sliding_window"}
    tensors = eagle_tensors(config) if method == "eagle3" else dflash_tensors(config)
    return method, config, tensors, save(folder, config, tensors)


@pytest.mark.parametrize(
    ("kind", "setup"),
    [
        *QUICK,
        *(
            pytest.param(kind, setup, marks=pytest.mark.slow)
            for kind in KINDS
            for setup in SETUPS
            if (kind, setup) not in QUICK
        ),
    ],
)
def test_drafts_are_the_references_and_tokens_those_without_drafts(
    engine: Engine, target: Tiny, tmp_path: Path, kind: str, setup: str
) -> None:
    method, config, tensors, folder = made(tmp_path / "draft", kind)
    llm = drafting(engine, target, method, folder, enable_prefix_caching=False, **SETUPS[setup])
    seen = watch(llm)
    assert tokens(llm) == tokens(engine(target.folder))
    assert (llm.get_metrics().preemptions > 0) == ("few blocks" in setup)
    reference, compared = (PEagle if method == "eagle3" else DFlash)(target, config, tensors), 0
    with torch.no_grad():
        for text, drafts in seen[:60] + seen[-10:]:
            if not drafts:
                continue
            for row, draft in zip(reference.logits(text, len(drafts)), drafts, strict=True):
                assert float(row.max() - row[draft]) < 1e-3
                compared += 1
    assert compared > 60


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_prefix_of_the_cache_changes_no_token(engine: Engine, target: Tiny, tmp_path: Path, kind: str) -> None:
    method, _, _, folder = made(tmp_path / "draft", kind)
    llm, expected = drafting(engine, target, method, folder, block_size=4), tokens(engine(target.folder))
    assert tokens(llm) == expected
    assert tokens(llm) == expected
    assert llm.get_metrics().prefix_hits > 0


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_texts_as_long_as_the_model_allows(engine: Engine, target: Tiny, tmp_path: Path, kind: str) -> None:
    method, config, tensors, folder = made(tmp_path / "draft", kind)
    llm = drafting(engine, target, method, folder)
    seen = watch(llm)
    greedy = SamplingParams(temperature=0.0, max_tokens=LONGEST, ignore_eos=True)
    prompts = random_prompts((60, 73))
    found = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
    plain = engine(target.folder, max_model_len=LONGEST)
    assert found == [output.outputs[0].token_ids for output in plain.generate(prompts, greedy)]
    reference, ends = (PEagle if method == "eagle3" else DFlash)(target, config, tensors), 0
    with torch.no_grad():
        for text, drafts in seen:
            if not drafts or len(text) + DRAFTS < LONGEST:
                continue
            for row, draft in zip(reference.logits(text, len(drafts)), drafts, strict=True):
                assert float(row.max() - row[draft]) < 1e-3
                ends += 1
    assert ends > 2


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_drafts_of_requests_that_sample_are_drawn(engine: Engine, target: Tiny, tmp_path: Path, kind: str) -> None:
    method, _, _, folder = made(tmp_path / "draft", kind)
    llm = drafting(engine, target, method, folder)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=24, ignore_eos=True)
    once, again = ([o.outputs[0].token_ids for o in llm.generate(PROMPTS, sampled)] for _ in range(2))
    assert once == again
    assert all(len(ids) == 24 for ids in once)


def test_a_parallel_checkpoint_may_draft_one_after_another(engine: Engine, target: Tiny, tmp_path: Path) -> None:
    method, config, tensors, folder = made(tmp_path / "draft", "eagle3")
    options = {"plugins.options": {"eagle3": {"parallel_drafting": False}}}
    llm = drafting(engine, target, method, folder, **options)
    seen = watch(llm)
    assert tokens(llm) == tokens(engine(target.folder))
    reference = PEagle(target, config, tensors)
    with torch.no_grad():
        for text, drafts in seen[:10]:
            # Of the first draft all is known.
            row = reference.logits(text, 1)[0]
            assert float(row.max() - row[drafts[0]]) < 1e-3


def test_one_pass_is_refused_without_masks(engine: Engine, target: Tiny, tmp_path: Path) -> None:
    config = {name: value for name, value in EAGLE.items() if name != "ptd_token_id"}
    folder = save(tmp_path / "draft", config, eagle_tensors(config))
    assert tokens(drafting(engine, target, "eagle3", folder)) == tokens(engine(target.folder))
    options = {"plugins.options": {"eagle3": {"parallel_drafting": True}}}
    with pytest.raises(ConfigError, match="nothing that stands for tokens and features") as caught:
        drafting(engine, target, "eagle3", folder, **options)
    assert caught.value.field == "plugins.options.eagle3.parallel_drafting"


def test_one_pass_is_refused_for_trees(engine: Engine, target: Tiny, tmp_path: Path) -> None:
    method, _, _, folder = made(tmp_path / "draft", "eagle3")
    options = {"plugins.options": {"eagle3": {"tree_width": 2, "tree_depth": 2}}}
    with pytest.raises(ConfigError, match="do not branch") as caught:
        drafting(engine, target, method, folder, **options)
    assert caught.value.field == "plugins.options.eagle3.tree_width"


def test_masks_that_the_config_promises_must_be_there(engine: Engine, target: Tiny, tmp_path: Path) -> None:
    tensors = eagle_tensors(EAGLE)
    del tensors["mask_hidden"]
    with pytest.raises(CheckpointError, match="mask_hidden"):
        drafting(engine, target, "eagle3", save(tmp_path / "draft", EAGLE, tensors))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}, "layer_types"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 16}, "use_sliding_window"),
        ({"is_causal": True}, "is_causal"),
        ({"dflash_config": {**DFLASH["dflash_config"], "use_swa": True}}, "dflash_config.use_swa"),
        ({"dflash_config": {**DFLASH["dflash_config"], "causal": True}}, "dflash_config.causal"),
        ({"dflash_config": {"mask_token_id": MASK}}, "dflash_config.target_layer_ids"),
        ({"dflash_config": {**DFLASH["dflash_config"], "mask_token_id": VOCAB}}, "dflash_config.mask_token_id"),
    ],
)
def test_other_kinds_of_blocks_are_refused(
    engine: Engine, target: Tiny, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    folder = save(tmp_path / "draft", {**DFLASH, **changes}, dflash_tensors(DFLASH))
    with pytest.raises(CheckpointError) as caught:
        drafting(engine, target, "dflash", folder)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"projector_type": "domino"}, "projector_type"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"target_hidden_size": 2 * WIDTH}, "target_hidden_size"),
        ({"mask_token_id": None}, "dflash_config.mask_token_id"),
        (
            {"transformer_layer_config": {**CONFIG, "layer_types": ["sliding_attention"] * LAYERS}},
            "transformer_layer_config.layer_types",
        ),
    ],
)
def test_other_blocks_of_the_library_are_refused(
    engine: Engine, target: Tiny, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    folder = save(tmp_path / "draft", {**LIBRARY, **changes}, dflash_tensors(LIBRARY))
    with pytest.raises(CheckpointError) as caught:
        drafting(engine, target, "dflash", folder)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "settings", "field"),
    [
        ({"num_target_layers": 9}, {}, "speculative.model"),
        (
            {"num_target_layers": None, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [8]}},
            {},
            "speculative.model",
        ),
        ({}, {"speculative.num_speculative_tokens": 8}, "speculative.num_speculative_tokens"),
        ({}, {"max_num_seqs": 3}, "scheduler.max_num_seqs"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(
    engine: Engine, target: Tiny, tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], field: str
) -> None:
    config = {**DFLASH, **changes}
    folder = save(tmp_path / "draft", config, dflash_tensors(config))
    with pytest.raises(ConfigError) as caught:
        drafting(engine, target, "dflash", folder, **settings)
    assert caught.value.field == field


def test_a_checkpoint_of_another_kind_is_refused(engine: Engine, target: Tiny, tmp_path: Path) -> None:
    _, _, _, folder = made(tmp_path / "draft", "dflash")
    with pytest.raises(ConfigError, match="no eagle3 checkpoint"):
        drafting(engine, target, "eagle3", folder)
    with pytest.raises(ConfigError, match="no dflash checkpoint"):
        drafting(engine, target, "dflash", target.folder)
