"""Relatives of Llama: each differs in names, keys, or one thing that a layer does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import POST, Layers, alibi_slopes, every, expect, windows_by_type
from jackfield_models.llama import Llama
from jackfield_models.names import LLAMA
from jackfield_models.rope import read_rope


class Relative(Llama):
    """Base of those that are not in GGUF files."""

    kinds: ClassVar[frozenset[str]] = frozenset()
    gguf_architectures = frozenset()


class SeedOss(Relative):
    """``SeedOssForCausalLM``: the output projection's bias has a key of its own."""

    name = "SeedOssForCausalLM"
    summary = "Seed-OSS"
    kinds = frozenset({"SeedOssForCausalLM"})

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        hf.ignore("residual_dropout")
        bias = bool(hf.get("attention_bias", True))
        return {
            **super().details(hf, values),
            "qkv_bias": bias,
            "output_bias": bool(hf.get("attention_out_bias", False)),
        }


class SmolLm3(Relative):
    """``SmolLM3ForCausalLM``: every fourth layer does not rotate."""

    name = "SmolLM3ForCausalLM"
    summary = "SmolLM 3"
    kinds = frozenset({"SmolLM3ForCausalLM"})
    tied = True
    theta = 2000000.0

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        layers, step = values["num_layers"], hf.get("no_rope_layer_interval", 4)
        rotates = hf.get("no_rope_layers") or [int((i + 1) % step != 0) for i in range(layers)]
        rope = read_rope(hf, values["head_size"], theta=cls.theta)
        window = hf.get("sliding_window") if hf.get("use_sliding_window", False) else None
        types = hf.get("layer_types") or ["full_attention" if turns else "sliding_attention" for turns in rotates]
        return {
            **super().details(hf, values),
            "ropes": tuple(rope if turns else None for turns in rotates),
            "windows": windows_by_type(types, window),
        }


class Ernie(Relative):
    """``Ernie4_5ForCausalLM``: rotary pairs are neighbours; one key for all biases."""

    name = "Ernie4_5ForCausalLM"
    summary = "ERNIE 4.5, dense"
    kinds = frozenset({"Ernie4_5ForCausalLM"})
    tied = True
    paired = True
    theta = 500000.0

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        bias = bool(hf.get("use_bias", False))
        return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


class Hunyuan(Relative):
    """``HunYuanDenseV1ForCausalLM``: queries and keys are normalized per head, after they are rotated."""

    name = "HunYuanDenseV1ForCausalLM"
    summary = "Hunyuan dense models"
    kinds = frozenset({"HunYuanDenseV1ForCausalLM"})
    names = replace(
        LLAMA, layer={**LLAMA.layer, "q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
    )
    eps = ("rms_norm_eps", 1e-5)
    qk_norm = "head"

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        expect(hf, use_qk_norm=True, use_cla=False, cla_share_factor=1, num_experts=1)
        hf.ignore("eod_token_id", "org_vocab_size", "im_start_id", "im_end_id", "im_newline_id", "text_start_id")
        hf.ignore("text_end_id", "image_token_id", "mask_init_id", "pad_id", "bos_id", "eos_id", "sep_id")
        return {**super().details(hf, values), "qk_norm_last": True}


class Granite(Relative):
    """``GraniteForCausalLM``: factors on embeddings, scores, what layers add, and logits."""

    name = "GraniteForCausalLM"
    summary = "Granite 3 and 4, dense"
    kinds = frozenset({"GraniteForCausalLM"})

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        return {
            **super().details(hf, values),
            "embed_scale": float(hf.get("embedding_multiplier", 1.0)),
            "residual_scale": float(hf.get("residual_multiplier", 1.0)),
            "scales": (float(hf.get("attention_multiplier", 1.0)),) * values["num_layers"],
            "logit_scale": 1.0 / float(hf.get("logits_scaling", 1.0)),
        }


class MiniCpm(Relative):
    """``MiniCPMForCausalLM``: factors on embeddings, what layers add, and logits, from depth and width."""

    name = "MiniCPMForCausalLM"
    summary = "MiniCPM 1 and 2, dense"
    kinds = frozenset({"MiniCPMForCausalLM"})
    tied = True

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        expect(hf, num_experts=0)
        base = hf.get("dim_model_base", values["hidden_size"])
        depth = float(hf.get("scale_depth", 0.0))
        return {
            **super().details(hf, values),
            "embed_scale": float(hf.get("scale_emb", 1.0)),
            "residual_scale": depth / values["num_layers"] ** 0.5 if depth else 1.0,
            "logit_scale": base / values["hidden_size"],
        }


class Phi3(Relative):
    """``Phi3ForCausalLM``: fused projections, LongRoPE, a window on every layer."""

    name = "Phi3ForCausalLM"
    summary = "Phi 3, 3.5 and 4"
    kinds = frozenset({"Phi3ForCausalLM"})
    names = replace(
        LLAMA,
        layer={
            **LLAMA.layer,
            **dict.fromkeys(("qkv.q", "qkv.k", "qkv.v"), "self_attn.qkv_proj"),
            **dict.fromkeys(("gate_up.gate", "gate_up.up"), "mlp.gate_up_proj"),
        },
    )
    eps = ("rms_norm_eps", 1e-5)
    max_position = 4096

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        expect(hf, full_attn_mod=1, interpolate_factor=1, attention_bias=False, mlp_bias=False, lm_head_bias=False)
        return super().details(hf, values)

    @classmethod
    def windows(cls, hf: ConfigReader, layers: int) -> Layers:
        """Return the one window for all layers."""
        return (hf.get("sliding_window"),) * layers


class BaichuanFirst(Relative):
    """``BaiChuanForCausalLM``: q, k and v are fused."""

    name = "BaiChuanForCausalLM"
    summary = "Baichuan 1, 7B"
    kinds = frozenset({"BaiChuanForCausalLM"})
    names = replace(LLAMA, layer={**LLAMA.layer, **dict.fromkeys(("qkv.q", "qkv.k", "qkv.v"), "self_attn.W_pack")})

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama: how long texts may be has another key in some."""
        return {**super().details(hf, values), "max_position": hf.get("model_max_length", values["max_position"])}


class Baichuan(BaichuanFirst):
    """``BaichuanForCausalLM``: the larger models have linear biases instead of rotations, and the head of the second
    version has rows of length 1 (arXiv:2309.10305).
    """

    name = "BaichuanForCausalLM"
    summary = "Baichuan 1, 13B, and Baichuan 2"
    kinds = frozenset({"BaichuanForCausalLM"})

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama. No key says which version it is or whether it rotates: sizes do."""
        second = hf.get("z_loss_weight") is not None or values["vocab_size"] == 125696
        found = {**super().details(hf, values), "unit_head": second}
        if values["hidden_size"] == 4096:
            return found
        return {**found, "alibi": alibi_slopes(values["num_heads"]), "ropes": (None,) * values["num_layers"]}


class InternLm2(Relative):
    """``InternLM2ForCausalLM``: q, k and v are fused, the heads that share a key next to each other."""

    name = "InternLM2ForCausalLM"
    summary = "InternLM 2 and 2.5"
    kinds = frozenset({"InternLM2ForCausalLM"})
    names = replace(
        LLAMA,
        top={"embed": "model.tok_embeddings", "norm": "model.norm", "head": "output"},
        layer={
            **dict.fromkeys(("qkv.q", "qkv.k", "qkv.v"), "attention.wqkv"),
            "o": "attention.wo",
            "gate_up.gate": "feed_forward.w1",
            "gate_up.up": "feed_forward.w3",
            "down": "feed_forward.w2",
            "input_norm": "attention_norm",
            "post_norm": "ffn_norm",
        },
        by_head=True,
    )

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        bias = bool(hf.get("bias", False))
        return {"qkv_bias": bias, "output_bias": bias}


class InternLm3(Relative):
    """``InternLM3ForCausalLM``: Llama with other keys for its biases."""

    name = "InternLM3ForCausalLM"
    summary = "InternLM 3"
    kinds = frozenset({"InternLM3ForCausalLM"})

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        bias = bool(hf.get("bias", hf.get("mlp_bias", False)))
        qkv_bias = bool(hf.get("qkv_bias", hf.get("attention_bias", False)))
        return {"qkv_bias": qkv_bias, "output_bias": bias, "mlp_bias": bias}


class Exaone(Relative):
    """``ExaoneForCausalLM``: Llama under other names."""

    name = "ExaoneForCausalLM"
    summary = "EXAONE 3 and 3.5"
    kinds = frozenset({"ExaoneForCausalLM"})
    names = replace(
        LLAMA,
        top={"embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"},
        layer={
            **{f"qkv.{s}": f"attn.attention.{s}_proj" for s in "qkv"},
            "o": "attn.attention.out_proj",
            "gate_up.gate": "mlp.c_fc_0",
            "gate_up.up": "mlp.c_fc_1",
            "down": "mlp.c_proj",
            "input_norm": "ln_1",
            "post_norm": "ln_2",
        },
        layers="transformer.h",
        ignore=(r".*\.rotary\.inv_freq",),
    )
    keys = {"num_hidden_layers": "num_layers"}
    eps = ("layer_norm_epsilon", 1e-5)
    activation = ("activation_function", "silu")

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        hf.ignore("embed_dropout")
        return {}


class Exaone4(Relative):
    """``Exaone4ForCausalLM``: norms behind attention and MLP alone; layers without a window do not rotate."""

    name = "Exaone4ForCausalLM"
    summary = "EXAONE 4"
    kinds = frozenset({"Exaone4ForCausalLM"})
    names = replace(
        LLAMA,
        layer={
            **{key: source for key, source in LLAMA.layer.items() if key not in ("input_norm", "post_norm")},
            "attention_norm": "post_attention_layernorm",
            "mlp_norm": "post_feedforward_layernorm",
        },
    )
    eps = ("rms_norm_eps", 1e-5)

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        layers, window = values["num_layers"], hf.get("sliding_window")
        pattern = hf.get("sliding_window_pattern", 4)
        types = hf.get("layer_types") or _pattern_types(pattern if window else 1, layers)
        rope = read_rope(hf, values["head_size"])
        windows = windows_by_type(types, window)
        return {
            "norms": POST,
            "qk_norm": "head",
            "windows": windows,
            "ropes": tuple(rope if window is None or mine is not None else None for mine in windows),
        }


class Helium(Relative):
    """``HeliumForCausalLM``: rotary pairs are neighbours."""

    name = "HeliumForCausalLM"
    summary = "Helium 1"
    kinds = frozenset({"HeliumForCausalLM"})
    eps = ("rms_norm_eps", 1e-8)
    theta = 100000.0
    paired = True

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama: the output projection never has a bias."""
        return {**super().details(hf, values), "output_bias": False}


class Arcee(Relative):
    """``ArceeForCausalLM``: an MLP that is not gated, with squared ReLU."""

    name = "ArceeForCausalLM"
    summary = "Arcee AFM"
    kinds = frozenset({"ArceeForCausalLM"})
    names = replace(LLAMA, layer={**LLAMA.layer, "up": "mlp.up_proj"})
    eps = ("rms_norm_eps", 1e-5)
    activation = ("hidden_act", "relu2")

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        return {**super().details(hf, values), "gated": False}


def _pattern_types(pattern: Any, layers: int) -> list[str]:
    """Return layer types from a number (every so-manieth is full) or a word of L and G, repeated."""
    if isinstance(pattern, str):
        word = {"L": "sliding_attention", "G": "full_attention"}
        types = [word[pattern[i % len(pattern)]] for i in range(layers)]
        return [*types[:-1], "full_attention"]
    return every(int(pattern), layers)
