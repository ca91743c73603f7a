"""BLOOM, Falcon and OPT: layer norms and plain MLPs, with positions that are linear, rotary or learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader, WeightMap
from jackfield_models.decoder import POST, PRE, DecoderConfig, alibi_slopes, expect
from jackfield_models.gpt import FUSED, MASKS, Gpt
from jackfield_models.names import ATTENTION, Names, weight_map


class Bloom(Gpt):
    """``BloomForCausalLM``: linear biases instead of positions, a norm behind the embedding."""

    name = "BloomForCausalLM"
    summary = "BLOOM and BLOOMZ"
    kinds: ClassVar[frozenset[str]] = frozenset({"BloomForCausalLM"})
    names = Names(
        top={
            "embed": "transformer.word_embeddings",
            "embed_norm": "transformer.word_embeddings_layernorm",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        layer=FUSED,
        layers="transformer.h",
        by_head=True,
        droppable="transformer.",
    )
    keys: ClassVar[Mapping[str, str]] = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    tied = True
    activation = ("hidden_act", "gelu_pytorch_tanh")

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        expect(hf, apply_residual_connection_post_layernorm=False)
        hf.ignore("slow_but_exact", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "attention_softmax_in_fp32")
        hf.ignore("masked_softmax_fusion", "bias_dropout_fusion", "n_inner", "seq_length")
        return {
            **super().details(hf, values),
            "max_position": hf.get("seq_length", 2048),
            "embed_norm": True,
            "alibi": alibi_slopes(values["num_heads"]),
            "ropes": (None,) * values["num_layers"],
        }


class Falcon(Gpt):
    """``FalconForCausalLM``: few cache heads, attention and MLP side by side or not, rotary or linear positions."""

    name = "FalconForCausalLM"
    summary = "Falcon 1 and 2, RefinedWeb"
    kinds: ClassVar[frozenset[str]] = frozenset({"FalconForCausalLM"})
    names = replace(Bloom.names, by_head=True, ignore=MASKS)
    keys = {"intermediate_size": "ffn_hidden_size"}
    tied = True
    activation = ("activation", "gelu")

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        heads, layers = values["num_heads"], values["num_layers"]
        alibi = bool(hf.get("alibi", False))
        bias = bool(hf.get("bias", False))
        scale = values["head_size"] ** -0.5
        found = {
            **super().details(hf, values),
            **cls.layout(hf),
            "num_kv_heads": cls.cache_heads(hf, heads),
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bias),
        }
        # Falcon scales its biases with the scores.
        slopes = tuple(slope * scale for slope in alibi_slopes(heads))
        if alibi:
            hf.ignore("rope_parameters", "rope_theta", "rope_scaling")
        return found | ({"alibi": slopes, "ropes": (None,) * layers} if alibi else {})

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture: two norms side by side have other names than two that follow one another."""
        names = cls.names
        if config.order == "parallel" and config.norms == PRE:
            names = replace(names, layer={**names.layer, "input_norm": "ln_attn", "post_norm": "ln_mlp"})
        return weight_map(names, config, paired=cls.paired)

    @classmethod
    def layout(cls, hf: ConfigReader) -> dict[str, Any]:
        """Return how attention and MLP follow one another, and their norms."""
        new, parallel = hf.get("new_decoder_architecture", False), hf.get("parallel_attn", True)
        two = hf.get("num_ln_in_parallel_attn", 2 if new else 1) == 2
        if new:
            expect(hf, parallel_attn=True)
        return {
            "order": "parallel" if parallel else "sequential",
            "norms": PRE if two or not parallel else frozenset({"input_norm"}),
        }

    @classmethod
    def cache_heads(cls, hf: ConfigReader, heads: int) -> int:
        """Return how many cache heads there are; the older architecture has one or all."""
        several, one = hf.get("num_kv_heads", heads), hf.get("multi_query", True)
        if hf.get("new_decoder_architecture", False):
            return int(several)
        return 1 if one else heads


class Opt(Gpt):
    """``OPTForCausalLM``: learned positions from row 2 on, ReLU; the embedding may be narrower than the layers."""

    name = "OPTForCausalLM"
    summary = "OPT and Galactica"
    kinds: ClassVar[frozenset[str]] = frozenset({"OPTForCausalLM"})
    names = Names(
        top={
            "embed": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "project_in": "model.decoder.project_in",
            "project_out": "model.decoder.project_out",
            "norm": "model.decoder.final_layer_norm",
            "head": "lm_head",
        },
        layer={
            **ATTENTION,
            "o": "self_attn.out_proj",
            "up": "fc1",
            "down": "fc2",
            **dict.fromkeys(("input_norm", "attention_norm"), "self_attn_layer_norm"),
            **dict.fromkeys(("post_norm", "mlp_norm"), "final_layer_norm"),
        },
        layers="model.decoder.layers",
        droppable="model.",
    )
    keys = {"intermediate_size": "ffn_dim"}
    tied = True
    eps = ("layer_norm_eps", 1e-5)
    activation = ("activation_function", "relu")

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        hf.ignore("layerdrop", "init_std", "activation_dropout")
        before = bool(hf.get("do_layer_norm_before", True))
        affine, bias = bool(hf.get("layer_norm_elementwise_affine", True)), bool(hf.get("enable_bias", True))
        return {
            **super().details(hf, values),
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bias),
            "order": "sequential" if before else "sum",
            "norms": PRE if before else POST,
            "norm_weight": affine,
            "norm_bias": affine,
            "final_norm": before and not hf.get("_remove_final_layer_norm", False),
            "embed_size": hf.get("word_embed_proj_dim", 0),
            "positions": values["max_position"] + 2,
            "position_offset": 2,
            "ropes": (None,) * values["num_layers"],
        }
