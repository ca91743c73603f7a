"""Llama and its near relatives: Mistral, Qwen2, Qwen3. One decoder, told apart by a few flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    AttentionGroup,
    BuildContext,
    ConfigReader,
    ModelArchitecture,
    RowOrder,
    TextConfig,
    WeightMap,
    WeightRule,
)

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig(TextConfig):
    """What the decoder needs.

    Args:
        qkv_bias, output_bias, mlp_bias: which projections add a bias. qk_norm: whether queries and keys are
            normalized per
            head. windows: per layer the sliding window, or None. permuted: whether q and k rows are stored in pairs
            (GGUF).
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    norm_eps: float
    activation: str
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]


class Llama(ModelArchitecture):
    """``LlamaForCausalLM``: pre-norm decoder, rotary embedding, grouped-query attention, gated MLP."""

    name = "LlamaForCausalLM"
    summary = "Llama 1 to 3 and models saved as such"
    kinds: ClassVar[frozenset[str]] = frozenset({"LlamaForCausalLM", "gguf:llama"})
    features: ClassVar[frozenset[str]] = frozenset({"taps", "embeddings_in"})
    tasks: ClassVar[frozenset[str]] = frozenset({"generate", "pool"})
    gguf_architectures: ClassVar[frozenset[str]] = frozenset({"llama"})
    qkv_bias: ClassVar[bool | None] = None
    """None: as ``attention_bias`` says."""
    qk_norm: ClassVar[bool] = False

    @classmethod
    def config(cls, hf: ConfigReader) -> LlamaConfig:
        """See ModelArchitecture."""
        heads, width = hf.require("num_attention_heads", int), hf.require("hidden_size", int)
        layers = hf.require("num_hidden_layers", int)
        theta, scaling = read_rope(hf)
        attention_bias = bool(hf.get("attention_bias", False))
        return LlamaConfig(
            vocab_size=hf.require("vocab_size", int),
            hidden_size=width,
            num_layers=layers,
            max_position=hf.get("max_position_embeddings", 2048),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or ""),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads", heads),
            head_size=hf.get("head_dim") or width // heads,
            intermediate_size=hf.require("intermediate_size", int),
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            activation=hf.get("hidden_act", "silu"),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=attention_bias if cls.qkv_bias is None else cls.qkv_bias,
            output_bias=attention_bias if cls.qkv_bias is None else False,
            mlp_bias=bool(hf.get("mlp_bias", False)),
            qk_norm=cls.qk_norm,
            windows=cls.windows(hf, layers),
        )

    @classmethod
    def windows(cls, hf: ConfigReader, layers: int) -> tuple[int | None, ...]:
        """Return each layer's sliding window."""
        return (None,) * layers

    @classmethod
    def gguf_config(cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
        """See ModelArchitecture."""
        return gguf_decoder_config(metadata, tensors)

    @classmethod
    def attention_groups(cls, config: LlamaConfig) -> tuple[AttentionGroup, ...]:
        """See ModelArchitecture."""
        groups = []
        for window in dict.fromkeys(config.windows):
            groups.append(
                AttentionGroup(
                    name="full" if window is None else f"sliding_{window}",
                    kind="full" if window is None else "sliding",
                    layers=tuple(i for i, w in enumerate(config.windows) if w == window),
                    num_heads=config.num_heads,
                    num_kv_heads=config.num_kv_heads,
                    head_size=config.head_size,
                    value_head_size=config.head_size,
                    scale=config.head_size**-0.5,
                    window=window,
                    features=frozenset({"gqa"}) if config.num_kv_heads != config.num_heads else frozenset(),
                )
            )
        return tuple(groups)

    @classmethod
    def weight_map(cls, config: LlamaConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        if container == "gguf":
            return _gguf_weight_map(config, permuted="llama" in cls.gguf_architectures)
        return _hf_weight_map(config)

    @classmethod
    def build(cls, config: LlamaConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_models.llama_model import LlamaModel

        return LlamaModel(config, cls.attention_groups(config), ctx)


class Mistral(Llama):
    """``MistralForCausalLM``: every layer may have a sliding window."""

    name = "MistralForCausalLM"
    summary = "Mistral 7B and its descendants"
    kinds = frozenset({"MistralForCausalLM"})
    gguf_architectures = frozenset()
    qkv_bias: ClassVar[bool | None] = False

    @classmethod
    def windows(cls, hf: ConfigReader, layers: int) -> tuple[int | None, ...]:
        """Return the one window for all layers."""
        return (hf.get("sliding_window"),) * layers


class Qwen2(Llama):
    """``Qwen2ForCausalLM``: biases on q, k and v; upper layers may have a sliding window."""

    name = "Qwen2ForCausalLM"
    summary = "Qwen 1.5, 2 and 2.5"
    kinds = frozenset({"Qwen2ForCausalLM", "gguf:qwen2"})
    gguf_architectures = frozenset({"qwen2"})
    qkv_bias: ClassVar[bool | None] = True

    @classmethod
    def windows(cls, hf: ConfigReader, layers: int) -> tuple[int | None, ...]:
        """Return windows from ``layer_types``, or from ``max_window_layers`` where that is absent."""
        window, first = hf.get("sliding_window"), hf.get("max_window_layers", layers)
        types = hf.get("layer_types")
        if not hf.get("use_sliding_window", False):
            window = None
        if types is None:
            return tuple(window if i >= first else None for i in range(layers))
        return tuple(window if kind == "sliding_attention" else None for kind in types)


class Qwen3(Qwen2):
    """``Qwen3ForCausalLM``: no biases, queries and keys are normalized per head."""

    name = "Qwen3ForCausalLM"
    summary = "Qwen 3 dense models"
    kinds = frozenset({"Qwen3ForCausalLM", "gguf:qwen3"})
    gguf_architectures = frozenset({"qwen3"})
    qkv_bias = None
    qk_norm = True


def read_rope(hf: ConfigReader) -> tuple[float, Mapping[str, Any] | None]:
    """Return (theta, scaling) from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    parameters = hf.get("rope_parameters")
    if parameters is not None:
        hf.ignore("rope_theta", "rope_scaling")
        return float(parameters.get("rope_theta", 10000.0)), parameters
    return float(hf.get("rope_theta", 10000.0)), hf.get("rope_scaling")


def gguf_decoder_config(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return HF-style keys of a Llama-like decoder from GGUF metadata ``ARCH.*`` and tensor shapes."""
    arch = metadata["general.architecture"]

    def key(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        if value is None:
            raise CheckpointError(
                "a GGUF file lacks a metadata key that the architecture needs", field=f"{arch}.{name}", value=None
            )
        return value

    heads, width = key("attention.head_count"), key("embedding_length")
    found = {
        "vocab_size": tensors["token_embd.weight"][0],
        "hidden_size": width,
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv", heads),
        "head_dim": key("attention.key_length", width // heads),
        "intermediate_size": key("feed_forward_length"),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": float(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(key("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "dtype": "float32",
    }
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", ""):
        found["rope_scaling"] = {"rope_type": kind, "factor": key("rope.scaling.factor")}
    return found


def _hf_weight_map(config: LlamaConfig) -> WeightMap:
    rules = [WeightRule("model.embed_tokens", "embed"), WeightRule("model.norm", "norm")]
    for i in range(config.num_layers):
        source, target = f"model.layers.{i}", f"layers.{i}"
        rules += [WeightRule(f"{source}.self_attn.{s}_proj", f"{target}.qkv", s) for s in ("q", "k", "v")]
        rules += [WeightRule(f"{source}.mlp.{s}_proj", f"{target}.gate_up", s) for s in ("gate", "up")]
        rules += [
            WeightRule(f"{source}.self_attn.o_proj", f"{target}.o"),
            WeightRule(f"{source}.mlp.down_proj", f"{target}.down"),
            WeightRule(f"{source}.input_layernorm", f"{target}.input_norm"),
            WeightRule(f"{source}.post_attention_layernorm", f"{target}.post_norm"),
        ]
        if config.qk_norm:
            rules += [WeightRule(f"{source}.self_attn.{s}_norm", f"{target}.{s}_norm") for s in ("q", "k")]
    ignore = [r".*\.rotary_emb\.inv_freq"]
    if config.tie_embeddings:
        ignore.append(r"lm_head\.weight")
    else:
        rules.append(WeightRule("lm_head", "head"))
    return WeightMap(tuple(rules), tuple(ignore))


def _gguf_weight_map(config: LlamaConfig, *, permuted: bool) -> WeightMap:
    def rows(heads: int) -> RowOrder | None:
        return RowOrder("interleaved_pairs", heads) if permuted else None

    rules = [WeightRule("token_embd", "embed"), WeightRule("output_norm", "norm")]
    for i in range(config.num_layers):
        source, target = f"blk.{i}", f"layers.{i}"
        rules += [
            WeightRule(f"{source}.attn_q", f"{target}.qkv", "q", rows(config.num_heads)),
            WeightRule(f"{source}.attn_k", f"{target}.qkv", "k", rows(config.num_kv_heads)),
            WeightRule(f"{source}.attn_v", f"{target}.qkv", "v"),
            WeightRule(f"{source}.attn_output", f"{target}.o"),
            WeightRule(f"{source}.ffn_gate", f"{target}.gate_up", "gate"),
            WeightRule(f"{source}.ffn_up", f"{target}.gate_up", "up"),
            WeightRule(f"{source}.ffn_down", f"{target}.down"),
            WeightRule(f"{source}.attn_norm", f"{target}.input_norm"),
            WeightRule(f"{source}.ffn_norm", f"{target}.post_norm"),
        ]
        if config.qk_norm:
            rules += [WeightRule(f"{source}.attn_{s}_norm", f"{target}.{s}_norm") for s in ("q", "k")]
    if not config.tie_embeddings:
        rules.append(WeightRule("output", "head"))
    return WeightMap(tuple(rules))
