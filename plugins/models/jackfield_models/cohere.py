"""Cohere's Command R: attention and MLP side by side, layer norms without bias, scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import Decoder, every, expect, windows_by_type
from jackfield_models.olmo import attention_biases
from jackfield_models.rope import read_rope


class Cohere(Decoder):
    """``CohereForCausalLM``: rotary pairs are neighbours; queries and keys may be normalized per head."""

    name = "CohereForCausalLM"
    summary = "Command R and R+"
    kinds: ClassVar[frozenset[str]] = frozenset({"CohereForCausalLM"})
    tied = True
    paired = True
    eps = ("layer_norm_eps", 1e-5)
    theta = 500000.0
    max_position = 8192

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {
            **attention_biases(hf),
            "order": "parallel",
            "norms": frozenset({"input_norm"}),
            "norm_kind": "layer",
            "norm_bias": False,
            "qk_norm": "heads" if hf.get("use_qk_norm", False) else "",
            "qk_norm_kind": "layer",
            "logit_scale": float(hf.get("logit_scale", 0.0625)),
        }


class Cohere2(Cohere):
    """``Cohere2ForCausalLM``: every fourth layer sees all and does not rotate, the others have a window."""

    name = "Cohere2ForCausalLM"
    summary = "Command R7B and Command A"
    kinds = frozenset({"Cohere2ForCausalLM"})

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        expect(hf, order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj", rotary_pct=1.0)
        expect(hf, use_gated_activation=True, use_parallel_block=True, use_embedding_sharing=values["tie_embeddings"])
        hf.ignore("cache_implementation", "use_parallel_embedding", "layer_switch")
        pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 4
        types = hf.get("layer_types") or every(pattern, values["num_layers"])
        windows = windows_by_type(types, hf.get("sliding_window", 4096))
        rope = read_rope(hf, values["head_size"], theta=cls.theta)
        return {
            **super().details(hf, values),
            "windows": windows,
            "ropes": tuple(rope if window is not None else None for window in windows),
        }
