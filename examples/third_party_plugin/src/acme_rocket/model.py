"""The light half: reads the configuration and says where weights go. Nothing here imports torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(TextConfig):
    """What the modules need."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    eps: float
    theta: float


class RocketModel(ModelArchitecture):
    """A pre-norm decoder with rotary embeddings, grouped heads and a gated MLP."""

    name = "RocketForCausalLM"
    summary = "an example: a decoder like Llama"
    kinds = frozenset({"RocketForCausalLM"})

    @classmethod
    def config(cls, hf: ConfigReader) -> Config:
        heads, width = hf.require("num_attention_heads", int), hf.require("hidden_size", int)
        rope = hf.section("rope_parameters")
        theta = 10000.0 if rope is None else float(rope.get("rope_theta", 10000.0))
        _expect(hf, hidden_act="silu", attention_bias=False, mlp_bias=False)
        if rope is not None:
            _expect(rope, rope_type="default")
        return Config(
            vocab_size=hf.require("vocab_size", int),
            hidden_size=width,
            num_layers=hf.require("num_hidden_layers", int),
            max_position=hf.require("max_position_embeddings", int),
            dtype=hf.get("dtype", ""),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads", heads),
            head_size=hf.get("head_dim", width // heads),
            intermediate_size=hf.require("intermediate_size", int),
            eps=hf.require("rms_norm_eps", float),
            theta=theta,
        )

    @classmethod
    def attention_groups(cls, config: Config) -> tuple[AttentionGroup, ...]:
        return (
            AttentionGroup(
                name="full",
                kind="full",
                layers=tuple(range(config.num_layers)),
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_size=config.head_size,
                scale=config.head_size**-0.5,
                features=frozenset({"gqa"}) if config.num_kv_heads != config.num_heads else frozenset(),
            ),
        )

    @classmethod
    def weight_map(cls, config: Config, container: str) -> WeightMap:
        rules = [WeightRule("model.embed_tokens", "embed"), WeightRule("model.norm", "norm")]
        if not config.tie_embeddings:
            rules.append(WeightRule("lm_head", "head"))
        for index in range(config.num_layers):
            rules += cls._layer(f"model.layers.{index}", f"layers.{index}")
        return WeightMap(tuple(rules), (r"lm_head\.weight",) if config.tie_embeddings else ())

    @classmethod
    def _layer(cls, source: str, target: str) -> Iterator[WeightRule]:
        yield WeightRule(f"{source}.input_layernorm", f"{target}.input_norm")
        yield WeightRule(f"{source}.post_attention_layernorm", f"{target}.post_norm")
        for shard in "qkv":
            yield WeightRule(f"{source}.self_attn.{shard}_proj", f"{target}.qkv", shard)
        yield WeightRule(f"{source}.self_attn.o_proj", f"{target}.o")
        for shard in ("gate", "up"):
            yield WeightRule(f"{source}.mlp.{shard}_proj", f"{target}.gate_up", shard)
        yield WeightRule(f"{source}.mlp.down_proj", f"{target}.down")

    @classmethod
    def build(cls, config: Config, ctx: BuildContext) -> "nn.Module":
        from acme_rocket.model_modules import Model

        return Model(config, cls.attention_groups(config)[0], ctx)


def _expect(hf: ConfigReader, **wanted: object) -> None:
    """Refuse what these modules do not do: computing something else in silence would be worse."""
    for key, value in wanted.items():
        if hf.get(key) not in (None, value):
            raise CheckpointError(
                f"this architecture knows only {key} = {value!r}",
                field=f"config.json: {key}",
                value=hf.get(key),
                remedy="use a plugin that does what the checkpoint asks for",
            )
