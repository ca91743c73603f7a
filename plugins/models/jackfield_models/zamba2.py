"""Zamba2: Mamba-2 layers, and a few transformer blocks that are used again and again, each time with other adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import AttentionGroup, BuildContext, ConfigReader, RowSlice, WeightMap, WeightRule
from jackfield_models.decoder import Decoder, DecoderConfig, expect
from jackfield_models.mamba import read_mamba2
from jackfield_models.mamba_parts import Mamba2Sizes
from jackfield_models.rope import read_rope

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Zamba2Config(DecoderConfig):
    """What the model needs besides.

    Args:
        uses: layers in front of which a shared block is used. blocks: how many there are; they take turns. rank: of the
            adapters. attention_adapters: queries, keys and values have some too.
    """

    uses: tuple[int, ...]
    blocks: int
    rank: int
    attention_adapters: bool


class Zamba2(Decoder):
    """``Zamba2ForCausalLM`` (arXiv:2411.15242)."""

    name = "Zamba2ForCausalLM"
    summary = "Zamba2"
    kinds: ClassVar[frozenset[str]] = frozenset({"Zamba2ForCausalLM"})
    tied = True
    eps = ("rms_norm_eps", 1e-5)
    activation = ("hidden_act", "gelu")
    max_position = 4096

    @classmethod
    def inner_size(cls, hf: ConfigReader, width: int) -> int:
        """See Decoder."""
        return int(hf.get("intermediate_size", 4 * width))

    @classmethod
    def config(cls, hf: ConfigReader) -> Zamba2Config:
        """See ModelArchitecture."""
        found = super().config(hf)
        values = {name: getattr(found, name) for name in DecoderConfig.__dataclass_fields__}
        types = hf.get("layers_block_type") or hf.get("layer_types") or hf.require("layers_block_type", list)
        uses = tuple(layer for layer, kind in enumerate(types) if kind == "hybrid")
        unknown = sorted(set(types) - {"hybrid", "mamba", "linear_attention"})
        if unknown or len(types) != found.num_layers:
            raise CheckpointError(
                "the list of layers does not fit the model",
                field="config.json: layers_block_type",
                value=types,
                remedy=f"name each of {found.num_layers} layers hybrid, mamba or linear_attention",
            )
        own = {
            "uses": uses,
            "blocks": min(int(hf.get("num_mem_blocks", 1)), len(uses)),
            "rank": int(hf.get("adapter_rank", 128)),
            "attention_adapters": bool(hf.get("use_shared_attention_adapter", False)),
        }
        return Zamba2Config(**{**values, **own})

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder. Heads of attention are over twice the width; its scores are scaled as if they were not."""
        expect(hf, use_long_context=False, use_shared_mlp_adapter=True, tie_word_embeddings=True)
        hf.ignore("attention_hidden_size", "attention_head_dim", "hybrid_layer_ids", "kv_channels", "num_query_groups")
        hf.ignore("chunk_size", "use_mamba_kernels", "use_mem_eff_path", "use_conv_bias", "num_logits_to_keep")
        hf.ignore("time_step_max", "time_step_floor", "mamba_headdim", "rescale_prenorm_residual")
        layers, size = values["num_layers"], 2 * values["hidden_size"] // values["num_heads"]
        rope = read_rope(hf, size)
        return {
            "head_size": size,
            "mlp_bias": bool(hf.get("add_bias_linear", False)),
            "ropes": (rope if hf.get("use_mem_rope", False) else None,) * layers,
            "scales": ((size / 2) ** -0.5,) * layers,
            "mixings": (cls.sizes(hf, values["hidden_size"]),) * layers,
        }

    @classmethod
    def sizes(cls, hf: ConfigReader, width: int) -> Mamba2Sizes:
        """Return the sizes of a Mamba-2 layer; its norm has an epsilon of its own."""
        heads, inner = int(hf.get("n_mamba_heads", 8)), int(hf.get("mamba_expand", 2) * width)
        return read_mamba2(
            hf,
            heads="n_mamba_heads",
            head_size=inner // heads,
            groups="mamba_ngroups",
            state="mamba_d_state",
            width=int(hf.get("mamba_d_conv", 4)),
            bias=bool(hf.get("add_bias_linear", False)),
            conv_bias=True,
            dt_limit=(float(hf.get("time_step_min", 0.001)), float("inf")),
            eps=1e-5,
        )

    @classmethod
    def attention_groups(cls, config: DecoderConfig) -> tuple[AttentionGroup, ...]:
        """See ModelArchitecture. What a shared block keeps at each use belongs to a layer of its own, whose index is
        that of the layer that it is used in front of plus the number of layers.
        """
        assert isinstance(config, Zamba2Config)
        groups = super().attention_groups(config)
        if not config.uses:
            return groups
        size = config.head_size
        full = AttentionGroup(
            name="full",
            kind="full",
            layers=tuple(config.num_layers + layer for layer in config.uses),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=size,
            value_head_size=size,
            scale=config.scales[0],
            features=frozenset({"gqa"} if config.num_kv_heads != config.num_heads else ()),
        )
        return (*groups, full)

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        assert isinstance(config, Zamba2Config)
        rules = [WeightRule("model.embed_tokens", "embed"), WeightRule("model.final_layernorm", "norm")]
        ignore = [rf"model\.layers\.{layer}\.shared_transformer\..*" for layer in config.uses[config.blocks :]]
        ignore.append(r"lm_head\.weight")
        for layer in range(config.num_layers):
            rules += _layer_rules(config, layer)
        for block in range(config.blocks):
            rules += _block_rules(config, f"model.layers.{config.uses[block]}.shared_transformer", f"blocks.{block}")
        for use in range(len(config.uses)):
            first = config.uses[use % config.blocks]
            rules += _adapter_rules(config, f"model.layers.{first}.shared_transformer", use)
        return WeightMap(tuple(rules), tuple(ignore))

    @classmethod
    def build(cls, config: DecoderConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_models.zamba2_model import Zamba2Model

        assert isinstance(config, Zamba2Config)
        return Zamba2Model(config, cls.attention_groups(config), ctx)


def _layer_rules(config: Zamba2Config, layer: int) -> Iterator[WeightRule]:
    source, target, mixing = f"model.layers.{layer}", f"layers.{layer}", config.mixing(layer)
    assert mixing is not None
    if layer in config.uses:
        yield WeightRule(f"{source}.linear", f"uses.{config.uses.index(layer)}.out")
        source += ".mamba_decoder"
    yield WeightRule(f"{source}.input_layernorm", f"{target}.norm")
    yield from mixing.rules(f"{source}.mamba", f"{target}.mixer")


def _block_rules(config: Zamba2Config, source: str, target: str) -> Iterator[WeightRule]:
    for shard in "qkv":
        yield WeightRule(f"{source}.self_attn.{shard}_proj", f"{target}.qkv", shard)
    yield from _gate_up(config, f"{source}.feed_forward.gate_up_proj", f"{target}.gate_up")
    names = {"self_attn.o_proj": "o", "feed_forward.down_proj": "down"}
    for name, part in (names | {"input_layernorm": "input_norm", "pre_ff_layernorm": "mlp_norm"}).items():
        yield WeightRule(f"{source}.{name}", f"{target}.{part}")


def _adapter_rules(config: Zamba2Config, source: str, use: int) -> Iterator[WeightRule]:
    target, below = f"uses.{use}", f"{source}.feed_forward.gate_up_proj_adapter_list.{use}"
    yield WeightRule(f"{below}.0", f"{target}.mlp_down")
    yield from _gate_up(config, f"{below}.1", f"{target}.mlp_up")
    for shard in "qkv" if config.attention_adapters else "":
        below = f"{source}.self_attn.linear_{shard}_adapter_list.{use}"
        yield WeightRule(f"{below}.0", f"{target}.qkv_down", shard)
        yield WeightRule(f"{below}.1", f"{target}.{shard}_up")


def _gate_up(config: Zamba2Config, source: str, target: str) -> Iterator[WeightRule]:
    size = config.intermediate_size
    for place, shard in enumerate(("gate", "up")):
        yield WeightRule(source, target, shard, cut=RowSlice(place * size, (place + 1) * size, 2 * size))
