"""EAGLE-1 and EAGLE-3 on random checkpoints in the published layouts, against a straightforward reference."""

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
from jackfield.errors import ConfigError

WIDTH, VOCAB, INNER, HEADS, KV, SIZE, DRAFT_VOCAB = 64, 260, 80, 4, 2, 16, 100
PROMPTS = random_prompts((3, 7, 18, 41))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=8, hidden_size=WIDTH)


def checkpoint(folder: Path, *, three: bool, small_vocab: bool = True) -> tuple[Path, Tensors]:
    layer = "midlayer" if three else "layers.0"
    width = 2 * WIDTH if three else WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (WIDTH, 3 * WIDTH if three else 2 * WIDTH),
        f"{layer}.self_attn.q_proj.weight": (HEADS * SIZE, width),
        f"{layer}.self_attn.k_proj.weight": (KV * SIZE, width),
        f"{layer}.self_attn.v_proj.weight": (KV * SIZE, width),
        f"{layer}.self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        f"{layer}.mlp.gate_proj.weight": (INNER, WIDTH),
        f"{layer}.mlp.up_proj.weight": (INNER, WIDTH),
        f"{layer}.mlp.down_proj.weight": (WIDTH, INNER),
        f"{layer}.post_attention_layernorm.weight": (WIDTH,),
    }
    vocab = DRAFT_VOCAB if small_vocab else VOCAB
    if three:
        shapes |= {f"{layer}.{n}.weight": (WIDTH,) for n in ("hidden_norm", "input_layernorm")}
        shapes |= {"norm.weight": (WIDTH,), "lm_head.weight": (vocab, WIDTH)}
    else:
        shapes |= {"fc.bias": (WIDTH,), "embed_tokens.weight": (VOCAB, WIDTH)}
    generator = torch.Generator().manual_seed(5)
    tensors = {n: torch.randn(shape, generator=generator) * 0.2 for n, shape in shapes.items()}
    tensors |= {n: 1.0 + t for n, t in tensors.items() if "norm" in n}
    if three and small_vocab:
        ids = torch.randperm(VOCAB, generator=generator)[:vocab].sort().values
        tensors["d2t"] = ids - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if three else "LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    config |= {"draft_vocab_size": vocab} if three else {"bias": True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


class Reference:
    """The paper's computation, over a whole sequence at once."""

    def __init__(self, target: Tiny, tensors: Tensors, *, three: bool) -> None:
        self.target, self.w, self.three = target.model, tensors, three
        self.layer = "midlayer" if three else "layers.0"
        self.rotary = LlamaRotaryEmbedding(self.target.config)
        self.rotary.inv_freq = 10000.0 ** (-torch.arange(0, SIZE, 2).float() / SIZE)

    def features(self, text: list[int]) -> torch.Tensor:
        """Return [T, E] what the target shows of a text."""
        out = self.target.model(torch.tensor([text]), output_hidden_states=True)
        if not self.three:
            return out.last_hidden_state[0]
        # hidden_states[i] is the input of layer i: layers 2, 4 and 5 of 8.
        return F.linear(torch.cat([out.hidden_states[i][0] for i in (2, 4, 5)], -1), self.w["fc.weight"])

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        name = f"{self.layer}.self_attn"
        q, k, v = (
            F.linear(x, self.w[f"{name}.{part}_proj.weight"]).view(len(x), -1, SIZE).transpose(0, 1)[None]
            for part in "qkv"
        )
        cos, sin = self.rotary(x, torch.arange(len(x))[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k, v = k.repeat_interleave(HEADS // KV, 1), v.repeat_interleave(HEADS // KV, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(out[0].transpose(0, 1).flatten(1), self.w[f"{name}.o_proj.weight"])

    def run(self, embeds: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return features behind each pair."""
        if self.three:
            normed = rms(embeds, self.w[f"{self.layer}.input_layernorm.weight"])
            x, stream = torch.cat((normed, rms(features, self.w[f"{self.layer}.hidden_norm.weight"])), -1), features
        else:
            x = stream = F.linear(torch.cat((embeds, features), -1), self.w["fc.weight"], self.w["fc.bias"])
        stream = stream + self.attention(x)
        inner = rms(stream, self.w[f"{self.layer}.post_attention_layernorm.weight"])
        gate, up = (F.linear(inner, self.w[f"{self.layer}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        return stream + F.linear(F.silu(gate) * up, self.w[f"{self.layer}.mlp.down_proj.weight"])

    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        """Return [V] the logits behind a text and some drafts."""
        embed = self.target.model.embed_tokens
        features, tokens = self.features(text[:-1]), torch.tensor(text[1:])
        for draft in [*drafts, None]:
            out = self.run(embed(tokens), features)
            if draft is not None:
                tokens, features = torch.cat((tokens, torch.tensor([draft]))), torch.cat((features, out[-1:]))
        if not self.three:
            return self.target.lm_head(out[-1])  # type: ignore[no-any-return]
        own = F.linear(rms(out[-1], self.w["norm.weight"]), self.w["lm_head.weight"])
        if "d2t" not in self.w:
            return own
        logits = torch.full((VOCAB,), float("-inf"))
        logits[torch.arange(len(own)) + self.w["d2t"]] = own
        return logits


def drafting(engine: Engine, target: Tiny, method: str, draft: Path, **settings: Any) -> LLM:
    speculative = {"speculative.method": method, "speculative.model": str(draft)}
    speculative |= {"speculative.num_speculative_tokens": 3, "speculative.adaptive": False}
    return engine(target.folder, **{**speculative, **settings})


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"long_prefill_token_threshold": 5, "block_size": 4},
    "few blocks": {"block_size": 4, "num_blocks": 24, "kv_cache_memory": None, "max_model_len": 80},
    "rounds": RECORDED,
    "rounds, few blocks": {**RECORDED, "block_size": 4, "num_blocks": 24, "kv_cache_memory": None, "max_model_len": 80},
}


@pytest.mark.parametrize(
    ("kind", "setup"),
    [
        ("eagle", "plain"),
        ("eagle3", "few blocks"),
        ("eagle", "rounds"),
        ("eagle3", "rounds, few blocks"),
        *(
            pytest.param(kind, setup, marks=pytest.mark.slow)
            for kind in ("eagle", "eagle3", "eagle3, all tokens")
            for setup in SETUPS
            if (kind, setup)
            not in (("eagle", "plain"), ("eagle3", "few blocks"), ("eagle", "rounds"), ("eagle3", "rounds, few blocks"))
        ),
    ],
)
def test_drafts_are_the_references_and_tokens_those_without_drafts(
    engine: Engine, target: Tiny, tmp_path: Path, kind: str, setup: str
) -> None:
    three = kind.startswith("eagle3")
    folder, tensors = checkpoint(tmp_path / "draft", three=three, small_vocab=kind == "eagle3")
    llm = drafting(engine, target, "eagle3" if three else "eagle", folder, enable_prefix_caching=False, **SETUPS[setup])
    seen = watch(llm)
    assert tokens(llm) == tokens(engine(target.folder))
    assert (llm.get_metrics().preemptions > 0) == ("few blocks" in setup)
    reference, compared = Reference(target, tensors, three=three), 0
    with torch.no_grad():
        for text, drafts in seen[:40] + seen[-10:]:
            for place, draft in enumerate(drafts):
                logits = reference.logits(text, drafts[:place])
                assert float(logits.max() - logits[draft]) < 1e-3, place
                compared += 1
    assert compared > 60


def test_a_prefix_of_the_cache_changes_no_token(engine: Engine, target: Tiny, tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "draft", three=True)
    llm = drafting(engine, target, "eagle3", folder, block_size=4)
    expected = tokens(engine(target.folder))
    assert tokens(llm) == expected
    assert tokens(llm) == expected
    assert llm.get_metrics().prefix_hits > 0


def test_a_target_with_too_few_layers_is_refused(engine: Engine, models: Any, tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "draft", three=True)
    with pytest.raises(ConfigError, match="looks at layers 1, 0, -1, and the target has 3") as caught:
        drafting(engine, models["llama"], "eagle3", folder)
    assert caught.value.field == "speculative.model"


def test_a_checkpoint_of_another_kind_is_refused(engine: Engine, models: Any, target: Tiny) -> None:
    with pytest.raises(ConfigError, match="no eagle checkpoint"):
        drafting(engine, target, "eagle", _qwen(models))


def _qwen(models: Any) -> Path:
    folder: Path = models["qwen3"].folder
    return folder
