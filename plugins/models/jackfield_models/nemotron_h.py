"""Nemotron-H: each layer is one of Mamba-2, attention, an MLP and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import ConfigReader, WeightMap
from jackfield_models.decoder import DecoderConfig, expect
from jackfield_models.mamba import read_mamba2
from jackfield_models.moe_biased import deepseek_experts
from jackfield_models.moe_decoder import SparseDecoder
from jackfield_models.moe_parts import Sparse, expert_names
from jackfield_models.names import Names, also

PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
TYPES = {**{kind: kind for kind in PATTERN.values()}, "linear_attention": "mamba", "full_attention": "attention"}

NAMES = Names(
    {"embed": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"},
    {
        **{f"qkv.{part}": f"mixer.{part}_proj" for part in "qkv"},
        "o": "mixer.o_proj",
        "up": "mixer.up_proj",
        "down": "mixer.down_proj",
        "input_norm": "norm",
        "post_norm": "norm",
    },
    "backbone.layers",
    mixings="mixer",
    ignore=(r"mtp\..*",),
    experts=expert_names(
        "mixer",
        each={"gate_up.up": ("mixer.experts.{}.up_proj",), "down": ("mixer.experts.{}.down_proj",)},
        together={"gate_up": ("mixer.experts.up_proj",), "down": ("mixer.experts.down_proj",)},
        shared={"up": "mixer.shared_experts.up_proj", "down": "mixer.shared_experts.down_proj"},
        latent={"latent_in": "mixer.fc1_latent_proj", "latent_out": "mixer.fc2_latent_proj"},
    ),
)


class NemotronH(SparseDecoder):
    """``NemotronHForCausalLM`` (arXiv:2504.03624). Layers that only draft are left out."""

    name = "NemotronHForCausalLM"
    summary = "Nemotron-H, Nemotron Nano 2 and 3"
    kinds: ClassVar[frozenset[str]] = frozenset({"NemotronHForCausalLM"})
    names: ClassVar[Names] = NAMES
    eps = ("layer_norm_epsilon", 1e-5)
    activation = ("mlp_hidden_act", "relu2")
    max_position = 4096

    @classmethod
    def require(cls, hf: ConfigReader, name: str) -> int:
        """See Decoder. The list of layers says how many there are."""
        if name != "num_hidden_layers":
            return super().require(hf, name)
        hf.ignore(name)
        return len(cls.types(hf))

    @classmethod
    def types(cls, hf: ConfigReader) -> list[str]:
        """Return what each layer is, one of PATTERN's values.

        Raises:
            CheckpointError: a layer is something else.
        """
        found = hf.get("hybrid_override_pattern")
        listed = hf.get("layers_block_type") or hf.get("layer_types")
        named = listed if listed is not None else [PATTERN.get(letter, letter) for letter in found or ""]
        unknown = sorted(set(named) - set(TYPES))
        if unknown or not named:
            raise CheckpointError(
                f"layers of these types are not known: {', '.join(unknown) or 'none is named'}",
                field="config.json: layers_block_type",
                value=listed or found,
                remedy=f"this architecture has {', '.join(TYPES)}",
            )
        return [TYPES[kind] for kind in named]

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        expect(hf, mamba_hidden_act="silu", attention_bias=False, sliding_window=None, mamba_ssm_cache_dtype="float32")
        hf.ignore("expand", "chunk_size", "num_logits_to_keep", "use_mamba_kernels", "rescale_prenorm_residual")
        hf.ignore("time_step_min", "time_step_max", "time_step_floor", "mamba_proj_bias", "num_query_groups")
        hf.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
        types = cls.types(hf)
        sizes = read_mamba2(
            hf, heads="mamba_num_heads", head_size="mamba_head_dim", groups="n_groups", state="ssm_state_size"
        )
        mixes = [kind in ("mamba", "attention") for kind in types]
        return {
            **super().details(hf, values),
            "gated": False,
            "ropes": (None,) * len(types),
            "mixings": tuple(sizes if kind == "mamba" else None for kind in types),
            "no_mixer": frozenset(layer for layer, mixing in enumerate(mixes) if not mixing),
            "no_mlp": frozenset(layer for layer, mixing in enumerate(mixes) if mixing),
            "wide_stream": bool(hf.get("residual_in_fp32", False)),
        }

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        layers = frozenset(layer for layer, kind in enumerate(cls.types(hf)) if kind == "moe")
        hf.ignore("moe_shared_expert_overlap", "n_shared_experts", "moe_shared_expert_intermediate_size")
        if not layers:
            hf.ignore("n_routed_experts", "moe_intermediate_size", "moe_latent_size", "num_experts_per_tok", "n_group")
            hf.ignore("topk_group", "norm_topk_prob", "routed_scaling_factor")
            return Sparse(experts=cls.block(hf, values, 0, top_k=0), layers=layers)
        found, latent = deepseek_experts(cls, hf, values), int(hf.get("moe_latent_size", 0))
        width = latent or values["hidden_size"]
        return replace(
            found,
            layers=layers,
            shared_size=int(hf.get("moe_shared_expert_intermediate_size", 0)),
            experts=replace(found.experts, gated=False, hidden_size=width),
            latent=latent,
        )

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        return also(super().weight_map(config, container), ("backbone.", "model."))
