"""Tiny random models whose checkpoints have a layer that only drafts, in the published layouts, and the reference for
what it says. transformers has no such layers and ignores them: the layer is the last of a model that has one more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils.logging import disable_progress_bar

from jackfield.testing.tiny import randomize

disable_progress_bar()

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": None,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.1,
    "head_dim": 16,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
NUMBERED = {"token": "{}.enorm", "state": "{}.hnorm", "fc": "{}.eh_proj", "norm": "{}.shared_head.norm"}
NAMED = {"token": "mtp.pre_fc_norm_embedding", "state": "mtp.pre_fc_norm_hidden", "fc": "mtp.fc", "norm": "mtp.norm"}


@dataclass(frozen=True)
class Family:
    """How a tiny model is made.

    Args:
        prefix: of the names of transformers' classes. values: of the configuration. parts: names of what is around the
            layer that drafts. layers: of the target. offset: added to the weights of norms. config: its class, where
            that is not called as the model is.
    """

    prefix: str
    values: dict[str, Any]
    parts: dict[str, str]
    layers: int = 2
    offset: float = 0.0
    config: str = ""
    without: tuple[str, ...] = ()

    @property
    def named(self) -> bool:
        """Whether the layer is not counted among the target's."""
        return self.parts is NAMED


STATES = {"layers": 4, "offset": 1.0}
FAMILIES: dict[str, Family] = {
    "deepseek-v3": Family("DeepseekV3", {**GROUPED, **LATENT}, NUMBERED),
    "glm4-moe": Family("Glm4Moe", {**GROUPED, "head_dim": 16, "use_qk_norm": True}, NUMBERED),
    "qwen3-next": Family("Qwen3Next", {**DELTA, **EXPERTS}, NAMED, **STATES),  # type: ignore[arg-type]
    "qwen3.5": Family("Qwen3_5", DELTA, NAMED, **STATES, config="Qwen3_5TextConfig"),  # type: ignore[arg-type]
    "qwen3.5-moe": Family(
        "Qwen3_5Moe",
        {**DELTA, **EXPERTS},
        NAMED,
        **STATES,  # type: ignore[arg-type]
        config="Qwen3_5MoeTextConfig",
        without=("intermediate_size",),
    ),
    "deepseek-v3.2": Family(
        "DeepseekV32",
        {**GROUPED, **LATENT, "num_key_value_heads": 4, "index_n_heads": 24, "index_head_dim": 12, "index_topk": 12},
        NUMBERED,
    ),
}


@dataclass(frozen=True)
class MtpTiny:
    """A random model: the folder that it was saved to, the target, and the layer that drafts."""

    folder: Path
    model: Any
    layer: Any
    parts: Tensors
    offset: float

    def drafts(self, text: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Return [V] the logits behind a text and some drafts: the layer goes on from its own states."""
        body = self.model.model
        states = body(torch.tensor([list(text[:-1])])).last_hidden_state[0]
        tokens = torch.tensor(list(text[1:]))
        for draft in [*drafts, None]:
            out = self._run(body.embed_tokens(tokens), states)
            if draft is not None:
                tokens, states = torch.cat((tokens, torch.tensor([draft]))), torch.cat((states, out[-1:]))
        return F.linear(out[-1], self.model.lm_head.weight)

    def _run(self, embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        x = torch.cat((self._norm(embeds, "token"), self._norm(states, "state")), -1)
        x = F.linear(x, self.parts["fc"])[None]
        count = x.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        rotated = self.model.model.rotary_emb(x, positions)
        out = self.layer(x, position_embeddings=rotated, attention_mask=mask, position_ids=positions)
        return self._norm(out[0], "norm")

    def _norm(self, x: torch.Tensor, part: str) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (self.parts[part] + self.offset)


Change = Callable[[Any, Any, Tensors], None]
"""Changes the weights of (target, layer, parts) before they are saved."""


@torch.no_grad()
def make_mtp(folder: Path, name: str, change: Change | None = None, layers: int = 0, **values: Any) -> MtpTiny:
    """Make, fill and save a random model of :data:`FAMILIES`; ``layers`` of the target, if not as many as usual, and
    ``values`` of its configuration.
    """
    family = FAMILIES[name] if not layers else replace(FAMILIES[name], layers=layers)
    sizes = {key: value for key, value in SIZES.items() if key not in family.without}
    given = {**sizes, **family.values, "num_hidden_layers": family.layers + 1, **values}
    if family.named:
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(family.layers)]
        given["layer_types"] = [*kinds, "full_attention"]
    config = getattr(transformers, family.config or f"{family.prefix}Config")(**given)
    torch.manual_seed(17)
    whole = getattr(transformers, f"{family.prefix}ForCausalLM")(config).float().eval()
    randomize(whole)
    layer = whole.model.layers[family.layers]
    width = config.hidden_size
    parts = {part: 1.0 - family.offset + 0.2 * torch.randn(width) for part in ("token", "state", "norm")}
    parts["fc"] = config.initializer_range * torch.randn(width, 2 * width)
    if change is not None:
        change(whole, layer, parts)
    whole.save_pretrained(folder)
    _as_published(folder, family, parts)
    whole.model.layers = whole.model.layers[: family.layers]
    whole.config.num_hidden_layers = family.layers
    return MtpTiny(folder, whole, layer, parts, family.offset)


def _as_published(folder: Path, family: Family, parts: Tensors) -> None:
    """Rewrite a model of one layer more as a target with a layer that drafts."""
    file, keys = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(file), json.loads(keys.read_text())
    plain = f"model.layers.{family.layers}"
    source = "mtp.layers.0" if family.named else plain
    tensors = {name.replace(f"{plain}.", f"{source}.", 1): tensor for name, tensor in tensors.items()}
    tensors |= {f"{family.parts[part].format(source)}.weight": tensor for part, tensor in parts.items()}
    if not family.named:
        tensors[f"{source}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{source}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        config["num_nextn_predict_layers"] = 1
    config["num_hidden_layers"] = family.layers
    for key in ("layer_types", "mlp_layer_types"):
        if config.get(key):
            config[key] = config[key][: family.layers]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    keys.write_text(json.dumps(config))


def always_right(whole: Any, layer: Any, parts: Tensors) -> None:
    """Let no layer add anything: then the next token follows from the last one alone, and the layer knows it too."""
    for name, parameter in whole.named_parameters():
        if name.split(".")[-1 if name.endswith("down_proj") else -2] in ("o_proj", "out_proj", "down_proj"):
            parameter.zero_()
    _passes_tokens(whole, parts)


def same_layer(whole: Any, layer: Any, parts: Tensors) -> None:
    """Let the layer be the target's only one, over embeddings of length 1. It sees a text from its second token on, so
    no token looks at the first, :data:`FIRST`, which is never said.
    """
    target, embed = whole.model.layers[0], whole.model.embed_tokens.weight
    embed[:, 0] = 3.0
    embed[FIRST, 0] = -3.0
    embed[:, 1:] = torch.randn_like(embed[:, 1:])
    embed.div_(embed.pow(2).mean(-1, keepdim=True).sqrt())
    whole.lm_head.weight[FIRST] = 0.0
    _sees_no_first(target.self_attn, whole.config)
    layer.load_state_dict(target.state_dict())
    _passes_tokens(whole, parts)


FIRST = 259


def _sees_no_first(attention: Any, config: Any) -> None:
    """Let one feature of every head that does not rotate be the sign of the stream's first feature, large."""
    if hasattr(attention, "kv_b_proj"):
        plain, value = config.qk_nope_head_dim, config.v_head_dim
        queries = attention.q_proj.weight.unflatten(0, (-1, plain + config.qk_rope_head_dim))[:, 0]
        latents, keys = attention.kv_a_proj_with_mqa.weight[:1], attention.kv_b_proj.weight
        keys = keys.unflatten(0, (-1, plain + value))[:, 0]
    else:
        queries, keys = (
            p.weight.unflatten(0, (-1, config.head_dim))[:, -1] for p in (attention.q_proj, attention.k_proj)
        )
        latents = keys
    for weight in (queries, latents, keys):
        weight.zero_()
        weight[:, 0] = 4.0


def _passes_tokens(whole: Any, parts: Tensors) -> None:
    """Let the layer take the token as it is, without the state."""
    width = whole.config.hidden_size
    parts["fc"] = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
    offset = 1.0 if hasattr(whole.config, "linear_num_key_heads") else 0.0
    parts["token"] = torch.full((width,), 1.0 - offset)
    parts["norm"] = whole.model.norm.weight.clone()
