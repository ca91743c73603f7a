"""EAGLE: a decoder layer that goes on from the target's own features. Configuration and weight maps.

EAGLE-1: Li et al. 2024, arXiv:2401.15077. EAGLE-3: Li et al. 2025, arXiv:2503.01840. P-EAGLE: 2026, arXiv:2602.01469.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    AttentionGroup,
    BuildContext,
    ConfigReader,
    ModelArchitecture,
    TextConfig,
    WeightMap,
    WeightRule,
)
from jackfield_spec_decode.eagle_forms import form_of

if TYPE_CHECKING:
    from torch import nn

LAYER = {
    "qkv.q": "self_attn.q_proj",
    "qkv.k": "self_attn.k_proj",
    "qkv.v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate_up.gate": "mlp.gate_proj",
    "gate_up.up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "post_norm": "post_attention_layernorm",
}
"""Checkpoint modules of a layer, by target and shard."""
FIRST = ("midlayer", "layers.0")
"""Names of EAGLE-3's first layer: the authors' and others'."""
IGNORE = (r"(model\.)?embed_tokens\.weight", r".*\.rotary_emb\.inv_freq")
"""The target's embedding is used, of which checkpoints may have a copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig(TextConfig):
    """What the layer needs.

    Args:
        num_heads, num_kv_heads, head_size, intermediate_size, norm_eps, bias, mlp_bias: as of any decoder.
        theta, scaling: of the rotary embedding. fc_bias: whether the projection of the input adds a bias.
        draft_vocab: tokens that the head knows, for EAGLE-3. feature_size: width of the target.
        taps: which layers of the target are looked at, by the layer that comes behind; () for the usual three.
        mask_token: stands for tokens that nobody knows yet, for layers that draft in parallel; None for others.
        mask_shape: of the features that stand for unknown ones. normed_stream: the residual stream begins with the
            normalized features.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    norm_eps: float
    theta: float
    scaling: Mapping[str, Any] | None
    bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    draft_vocab: int = 0
    feature_size: int = 0
    taps: tuple[int, ...] = ()
    mask_token: int | None = None
    mask_shape: tuple[int, ...] = ()
    normed_stream: bool = False
    own_embed: bool = False
    normed_taps: bool = False


class Eagle(ModelArchitecture):
    """``EagleLlamaForCausalLM``: the target's final state and the next token, one layer, the target's head."""

    name = "EagleLlamaForCausalLM"
    summary = "EAGLE-1 layers for Llama-like targets"
    kinds: ClassVar[frozenset[str]] = frozenset({"EagleLlamaForCausalLM"})
    tasks: ClassVar[frozenset[str]] = frozenset({"draft"})

    @classmethod
    def config(cls, hf: ConfigReader) -> EagleConfig:
        """See ModelArchitecture."""
        return EagleConfig(**decoder_keys(hf), fc_bias=bool(hf.get("bias", hf.get("eagle_fc_bias", False))))

    @classmethod
    def attention_groups(cls, config: EagleConfig) -> tuple[AttentionGroup, ...]:
        """See ModelArchitecture."""
        return (full_group(config),)

    @classmethod
    def weight_map(cls, config: EagleConfig, container: str) -> WeightMap:
        """See ModelArchitecture. The first layer's input has been normalized by the target."""
        rules = [WeightRule("model.fc", "fc")]
        for index in range(config.num_layers):
            rules += _layer(f"model.layers.{index}", f"layers.{index}")
            if index:
                rules.append(WeightRule(f"model.layers.{index}.input_layernorm", f"layers.{index}.input_norm"))
        return WeightMap(tuple(rules), (*IGNORE, r"lm_head\.weight"), droppable="model.")

    @classmethod
    def build(cls, config: EagleConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_spec_decode.eagle_model import EagleModule

        return EagleModule(config, cls.attention_groups(config)[0], ctx)


class Eagle3(Eagle):
    """``Eagle3LlamaForCausalLM``: states of three of the target's layers and the next token, one layer, a head over
    frequent tokens. More layers may follow, each of which takes what the one before it gives.

    Checkpoints that draft in parallel (P-EAGLE) have ``mask_hidden`` beside: features, before they are fused, that
    stand for unknown ones. Their config names the token that stands for unknown ones (``ptd_token_id``, ``pard_token``
    or ``mask_token_id``), and their embedding is their own, since that token was learnt.

    The first layer is called ``midlayer``, or ``layers.0``. The speculators library has the decoder's keys in a section
    of their own, and may have trained the embedding (``embed_requires_grad``) and a norm before ``fc``
    (``norm_before_fc``); Model Optimizer has taps in ``eagle_config``.
    """

    name = "Eagle3LlamaForCausalLM"
    summary = "EAGLE-3 layers for Llama-like targets, which may draft in parallel"
    kinds: ClassVar[frozenset[str]] = frozenset(
        {
            "Eagle3LlamaForCausalLM",
            "LlamaForCausalLMEagle3",
            "Eagle3Speculator",
            "Eagle3DraftModel",
            "PeagleLlamaForCausalLM",
            "PEagleDraftModel",
        }
    )

    @classmethod
    def config(cls, hf: ConfigReader) -> EagleConfig:
        """See ModelArchitecture."""
        form = form_of(hf)
        common = decoder_keys(form.decoder)
        width = hf.get("target_hidden_size", common["hidden_size"])
        token, shape = _mask(hf, (len(form.taps) or 3) * width, common["vocab_size"])
        return EagleConfig(
            **common,
            draft_vocab=hf.get("draft_vocab_size", common["vocab_size"]),
            feature_size=width,
            taps=form.taps,
            mask_token=token,
            mask_shape=shape,
            normed_stream=bool(hf.get("norm_before_residual", False)),
            own_embed=form.own_embed or token is not None,
            normed_taps=form.normed_taps,
        )

    @classmethod
    def weight_map(cls, config: EagleConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        names = {"fc": "fc", "norm": "norm", "lm_head": "head"}
        names |= {f"{first}.hidden_norm": "layers.0.hidden_norm" for first in FIRST}
        names |= {f"{first}.input_layernorm": "layers.0.input_norm" for first in FIRST}
        names |= {f"layers.{i}.input_layernorm": f"layers.{i}.input_norm" for i in range(1, config.num_layers)}
        names |= {"mask_hidden": "mask_hidden"} if config.mask_token is not None else {}
        names |= {"embed_tokens": "embed"} if config.own_embed else {}
        names |= {"input_norm": "taps_norm"} if config.normed_taps else {}
        names |= {"d2t": "d2t"} if config.draft_vocab != config.vocab_size else {}
        rules = [WeightRule(f"model.{source}", target) for source, target in names.items()]
        for first in FIRST:
            rules += _layer(f"model.{first}", "layers.0")
        for index in range(1, config.num_layers):
            rules += _layer(f"model.layers.{index}", f"layers.{index}")
        return WeightMap(tuple(rules), (*IGNORE, r"(model\.)?(t2d|d2t)"), droppable="model.")

    @classmethod
    def build(cls, config: EagleConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_spec_decode.eagle_model import Eagle3Module

        return Eagle3Module(config, cls.attention_groups(config)[0], ctx)


def usual_taps(layers: int) -> tuple[int, ...]:
    """Return behind how many of a target's layers EAGLE-3 looks where nothing else is said."""
    return 2, layers // 2, layers - 3


class Heads(Protocol):
    """Sizes of layers that are all alike."""

    @property
    def num_layers(self) -> int:
        """How many there are."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Cache heads."""

    @property
    def head_size(self) -> int:
        """Of queries, keys and values."""


def full_group(config: Heads) -> AttentionGroup:
    """Return the one group of layers that all attend to everything."""
    return AttentionGroup(
        name="full",
        kind="full",
        layers=tuple(range(config.num_layers)),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        value_head_size=config.head_size,
        scale=config.head_size**-0.5,
        features=frozenset({"gqa"} if config.num_kv_heads != config.num_heads else ()),
    )


def _layer(source: str, target: str) -> list[WeightRule]:
    rules = []
    for key, below in LAYER.items():
        part, _, shard = key.partition(".")
        rules.append(WeightRule(f"{source}.{below}", f"{target}.{part}", shard))
    return rules


def _mask(hf: ConfigReader, features: int, vocab: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the token that stands for unknown ones, or None, and the shape of the features that do.

    Raises:
        CheckpointError: there is no such token in the vocabulary.
    """
    names = ("ptd_token_id", "pard_token", "mask_token_id")
    said = {name: hf.get(name) for name in names}
    hf.ignore("parallel_drafting", "num_depths", "down_sample_ratio", "down_sample_ratio_min")
    for name in names:
        if said[name] is None:
            continue
        token = int(said[name])
        if not 0 <= token < vocab:
            raise CheckpointError(
                f"the token that stands for unknown ones is none of the {vocab}", field=name, value=said[name]
            )
        # Checkpoints of the paper's authors have one dimension more than those of others.
        return token, (1, 1, features) if name == "ptd_token_id" else (1, features)
    return None, ()


def decoder_keys(hf: ConfigReader) -> dict[str, Any]:
    """Return what the keys of a Llama-like decoder say, by field of :class:`EagleConfig`.

    Raises:
        CheckpointError: there is another activation.
    """
    act = hf.get("hidden_act", "silu")
    if act != "silu":
        raise CheckpointError("draft layers use silu", field="hidden_act", value=act, remedy="use another checkpoint")
    heads, width = hf.require("num_attention_heads", int), hf.require("hidden_size", int)
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    hf.ignore("tie_word_embeddings")
    return {
        "vocab_size": hf.require("vocab_size", int),
        "hidden_size": width,
        "num_layers": hf.get("num_hidden_layers", 1),
        "max_position": hf.get("max_position_embeddings", 2048),
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads", heads),
        "head_size": hf.get("head_dim", width // heads),
        "intermediate_size": hf.require("intermediate_size", int),
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "theta": float(scaling.get("rope_theta") or hf.get("rope_theta", 10000.0)),
        "scaling": None if kind == "default" else {**scaling, "rope_type": kind},
        "bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
    }
