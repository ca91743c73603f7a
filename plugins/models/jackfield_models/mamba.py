"""Models of Mamba layers alone: Mamba, Falcon Mamba and Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import Decoder, DecoderConfig, expect
from jackfield_models.mamba_parts import Mamba1Sizes, Mamba2Sizes
from jackfield_models.names import Names

LENGTH = 1 << 20
"""States hold any length; this is what is taken where a configuration does not say how far the training went."""

TRAINING_KEYS = (
    "time_step_scale",
    "time_step_min",
    "time_step_max",
    "time_step_init_scheme",
    "time_step_floor",
    "rescale_prenorm_residual",
    "use_mambapy",
    "use_associative_scan",
    "use_falcon_mambapy",
    "fused_add_norm",
    "pad_vocab_size_multiple",
    "d_model",
    "d_inner",
    "n_layer",
    "layer_types",
    "chunk_size",
)
"""Keys about initial values, or about how a step is computed and not what."""


NAMES = Names(
    {"embed": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"},
    {"input_norm": "norm"},
    "backbone.layers",
    mixings="mixer",
    ignore=(),
)


class Mamba(Decoder):
    """Mamba (arXiv:2312.00752)."""

    name = "MambaForCausalLM"
    summary = "Mamba"
    kinds: ClassVar[frozenset[str]] = frozenset({"MambaForCausalLM"})
    names = NAMES
    tied: ClassVar[bool] = True
    norms: ClassVar[str] = ""
    """How step sizes, B and C are normalized; see Mamba1Sizes."""

    @classmethod
    def config(cls, hf: ConfigReader) -> DecoderConfig:
        """See ModelArchitecture."""
        width = int(hf.require("hidden_size", int))
        expect(hf, hidden_act="silu", rms_norm=True)
        hf.ignore(*TRAINING_KEYS)
        layers = int(hf.require("num_hidden_layers", int))
        return DecoderConfig(
            vocab_size=int(hf.require("vocab_size", int)),
            hidden_size=width,
            num_layers=layers,
            max_position=int(hf.get("max_position_embeddings", LENGTH)),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or ""),
            tie_embeddings=bool(hf.get("tie_word_embeddings", cls.tied)),
            num_heads=0,
            num_kv_heads=0,
            head_size=0,
            intermediate_size=0,
            norms=frozenset({"input_norm"}),
            norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            ropes=(None,) * layers,
            mixings=(cls.sizes(hf, width),) * layers,
            no_mlp=frozenset(range(layers)),
            wide_stream=bool(hf.get("residual_in_fp32", True)),
        )

    @classmethod
    def sizes(cls, hf: ConfigReader, width: int) -> Mamba1Sizes | Mamba2Sizes:
        """Return the sizes of a layer."""
        rank, expand = hf.get("time_step_rank", "auto"), hf.get("expand", 2)
        return Mamba1Sizes(
            inner=int(hf.get("intermediate_size") or expand * width),
            state=int(hf.get("state_size", 16)),
            rank=-(-width // 16) if rank == "auto" else int(rank),
            width=int(hf.get("conv_kernel", 4)),
            bias=bool(hf.get("use_bias", False)),
            conv_bias=bool(hf.get("use_conv_bias", True)),
            norms=cls.norms,
            eps=float(hf.get("mixer_rms_eps", 1e-6)),
        )


class FalconMamba(Mamba):
    """Mamba with norms, without weights, over step sizes, B and C."""

    name = "FalconMambaForCausalLM"
    summary = "Falcon Mamba"
    kinds: ClassVar[frozenset[str]] = frozenset({"FalconMambaForCausalLM"})
    norms: ClassVar[str] = "plain"


class Mamba2(Mamba):
    """Mamba-2 (arXiv:2405.21060)."""

    name = "Mamba2ForCausalLM"
    summary = "Mamba-2, Codestral Mamba"
    kinds: ClassVar[frozenset[str]] = frozenset({"Mamba2ForCausalLM"})
    tied: ClassVar[bool] = False

    @classmethod
    def sizes(cls, hf: ConfigReader, width: int) -> Mamba2Sizes:
        """See Mamba."""
        hf.ignore("time_step_rank", "expand", "intermediate_size")
        return read_mamba2(hf, heads="num_heads", head_size="head_dim", groups="n_groups", state="state_size")


def read_mamba2(
    hf: ConfigReader, *, heads: str, head_size: str | int, groups: str, state: str, **more: Any
) -> Mamba2Sizes:
    """Return sizes from keys of these names, or a size itself; ``more`` as Mamba2Sizes takes it."""
    limit: Mapping[int, float] | Any = hf.get("time_step_limit") or (0.0, float("inf"))
    values: dict[str, Any] = {
        "width": int(hf.get("conv_kernel", 4)),
        "bias": bool(hf.get("use_bias", False)),
        "conv_bias": bool(hf.get("use_conv_bias", True)),
        "dt_limit": (float(limit[0]), float(limit[1])),
        "eps": float(hf.get("layer_norm_epsilon", 1e-5)),
    }
    sizes: dict[str, str | int] = {"heads": heads, "head_size": head_size, "groups": groups, "state": state}
    values |= {name: int(hf.require(key, int)) if isinstance(key, str) else key for name, key in sizes.items()}
    values["norm_size"] = values["heads"] * values["head_size"] // values["groups"]
    return Mamba2Sizes(**(values | more))
