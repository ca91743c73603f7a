"""OLMo hybrid: gated delta networks behind norms, and attention before norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader, WeightMap, WeightRule
from jackfield_models.decoder import POST, PRE, DecoderConfig
from jackfield_models.delta_parts import DeltaSizes
from jackfield_models.hybrid_parts import attends, mixed
from jackfield_models.llama import Llama
from jackfield_models.names import HEAD_NORMS, LLAMA, also
from jackfield_models.rope import read_rope

PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitDeltaSizes(DeltaSizes):
    """A gated delta network whose checkpoint has a matrix for each projection, and three convolutions."""

    def rules(self, source: str, target: str) -> Iterator[WeightRule]:
        """See DeltaSizes."""
        for name, shard in PROJECTIONS.items():
            yield WeightRule(f"{source}.{name}", f"{target}.in", shard)
        for shard in ("b", "a"):
            yield WeightRule(f"{source}.{shard}_proj", f"{target}.rates", shard)
        yield WeightRule(f"{source}.conv1d", f"{target}.conv")
        for shard in "qkv":
            yield WeightRule(f"{source}.{shard}_conv1d", f"{target}.conv", shard)
        for name, part in (("A_log", "a_log"), ("dt_bias", "dt_bias"), ("o_norm", "norm"), ("o_proj", "out")):
            yield WeightRule(f"{source}.{name}", f"{target}.{part}")


class OlmoHybrid(Llama):
    """``OlmoHybridForCausalLM``. Without ``rope_parameters``, nothing rotates."""

    name = "OlmoHybridForCausalLM"
    summary = "OLMo hybrid"
    kinds: ClassVar[frozenset[str]] = frozenset({"OlmoHybridForCausalLM"})
    gguf_architectures: ClassVar[frozenset[str]] = frozenset()
    names = replace(
        LLAMA,
        layer={
            **LLAMA.layer,
            **HEAD_NORMS,
            "attention_norm": "post_attention_layernorm",
            "mlp_norm": "post_feedforward_layernorm",
        },
        mixings="linear_attn",
    )
    qk_norm = "projection"
    max_position = 65536

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        layers = values["num_layers"]
        default = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
        attention = attends(hf.get("layer_types", default))
        rope = None if hf.get("rope_parameters") is None else read_rope(hf, values["head_size"])
        return {
            **super().details(hf, values),
            "layer_norms": tuple(POST if attended else PRE for attended in attention),
            "ropes": (rope,) * layers,
            "mixings": mixed(attention, cls.sizes(hf, values)),
        }

    @classmethod
    def sizes(cls, hf: ConfigReader, values: Mapping[str, Any]) -> SplitDeltaSizes:
        """Return the sizes of a gated delta network; its norm has an epsilon of its own."""
        hf.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
        heads = int(hf.get("linear_num_key_heads", values["num_heads"]))
        key = int(hf.get("linear_key_head_dim") or 0.75 * values["hidden_size"] / heads)
        return SplitDeltaSizes(
            key_heads=heads,
            heads=int(hf.get("linear_num_value_heads", values["num_heads"])),
            key=key,
            value=int(hf.get("linear_value_head_dim", 2 * key)),
            width=int(hf.get("linear_conv_kernel_dim", 4)),
            eps=1e-5,
            reach=2.0 if hf.get("linear_allow_neg_eigval", True) else 1.0,
        )

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        names = (("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm"))
        return also(super().weight_map(config, container), *names)
