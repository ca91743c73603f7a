"""Falcon H1: Mamba-2 and attention beside each other in every layer, with factors everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import Beside, expect
from jackfield_models.hybrid_parts import NAMES, bamba_sizes
from jackfield_models.llama import Llama


class FalconH1(Llama):
    """``FalconH1ForCausalLM`` (arXiv:2507.22448)."""

    name = "FalconH1ForCausalLM"
    summary = "Falcon H1"
    kinds: ClassVar[frozenset[str]] = frozenset({"FalconH1ForCausalLM"})
    gguf_architectures: ClassVar[frozenset[str]] = frozenset()
    names = NAMES
    eps = ("rms_norm_eps", 1e-5)
    max_position = 8192

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder. The factor on keys is part of the scale of scores."""
        expect(hf, hidden_act="silu")
        hf.ignore("num_logits_to_keep", "attn_layer_indices", "mamba_use_mlp", "mlp_expansion_factor")
        gate, down = hf.get("mlp_multipliers", (1.0, 1.0))
        scale = values["head_size"] ** -0.5 * float(hf.get("key_multiplier", 1.0))
        return {
            **super().details(hf, values),
            "scales": (scale,) * values["num_layers"],
            "embed_scale": float(hf.get("embedding_multiplier", 1.0)),
            "logit_scale": float(hf.get("lm_head_multiplier", 1.0)),
            "mlp_factors": None if gate == down == 1 else (float(gate), float(down)),
            "beside": cls.beside(hf, values),
        }

    @classmethod
    def beside(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Beside:
        """Return the Mamba-2 layers."""
        factors = tuple(float(factor) for factor in hf.get("ssm_multipliers", ()))
        sizes = bamba_sizes(
            hf,
            values["hidden_size"],
            values["norm_eps"],
            inner=hf.get("mamba_d_ssm", 0),
            norm=bool(hf.get("mamba_rms_norm", False)),
            gate_first=not hf.get("mamba_norm_before_gate", True),
            out_bias=bool(hf.get("projectors_bias", False)),
            factors=() if set(factors) == {1.0} else factors,
        )
        return Beside(
            mixing=sizes,
            attention_in=float(hf.get("attention_in_multiplier", 1.0)),
            attention_out=float(hf.get("attention_out_multiplier", 1.0)),
            mixing_in=float(hf.get("ssm_in_multiplier", 1.0)),
            mixing_out=float(hf.get("ssm_out_multiplier", 1.0)),
        )
