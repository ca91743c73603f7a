"""Llama and what is near it: a pre-norm decoder with rotary embeddings, grouped-query attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import ConfigReader, WeightMap
from jackfield_models.decoder import Decoder, DecoderConfig, Layers, windows_by_type
from jackfield_models.names import GGUF, weight_map

LlamaConfig = DecoderConfig


class Llama(Decoder):
    """``LlamaForCausalLM``: pre-norm decoder, rotary embedding, grouped-query attention, gated MLP."""

    name = "LlamaForCausalLM"
    summary = "Llama 1 to 3 and models saved as such"
    kinds: ClassVar[frozenset[str]] = frozenset({"LlamaForCausalLM", "gguf:llama"})
    gguf_architectures: ClassVar[frozenset[str]] = frozenset({"llama"})
    qkv_bias: ClassVar[bool | None] = None
    """None: as ``attention_bias`` says."""
    qk_norm: ClassVar[str] = ""

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return biases and windows."""
        attention_bias = bool(hf.get("attention_bias", False))
        return {
            "qkv_bias": attention_bias if cls.qkv_bias is None else cls.qkv_bias,
            "output_bias": attention_bias if cls.qkv_bias is None else False,
            "mlp_bias": bool(hf.get("mlp_bias", False)),
            "qk_norm": cls.qk_norm,
            "windows": cls.windows(hf, values["num_layers"]),
        }

    @classmethod
    def windows(cls, hf: ConfigReader, layers: int) -> Layers:
        """Return each layer's sliding window."""
        return (None,) * layers

    @classmethod
    def gguf_config(cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
        """See ModelArchitecture."""
        return gguf_decoder_config(metadata, tensors)

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        if container == "gguf":
            return weight_map(GGUF, config, paired="llama" in cls.gguf_architectures)
        return weight_map(cls.names, config, paired=cls.paired)


class Mistral(Llama):
    """``MistralForCausalLM``: every layer may have a sliding window."""

    name = "MistralForCausalLM"
    summary = "Mistral 7B and its descendants"
    kinds = frozenset({"MistralForCausalLM"})
    gguf_architectures = frozenset()
    qkv_bias: ClassVar[bool | None] = False

    @classmethod
    def windows(cls, hf: ConfigReader, layers: int) -> Layers:
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
    def windows(cls, hf: ConfigReader, layers: int) -> Layers:
        """Return windows from ``layer_types``, or from ``max_window_layers`` where that is absent."""
        window, first = hf.get("sliding_window"), hf.get("max_window_layers", layers)
        types = hf.get("layer_types")
        if not hf.get("use_sliding_window", False):
            window = None
        if types is None:
            return tuple(window if i >= first else None for i in range(layers))
        return windows_by_type(types, window)


class Qwen3(Qwen2):
    """``Qwen3ForCausalLM``: no biases, queries and keys are normalized per head."""

    name = "Qwen3ForCausalLM"
    summary = "Qwen 3 dense models"
    kinds = frozenset({"Qwen3ForCausalLM", "gguf:qwen3"})
    gguf_architectures = frozenset({"qwen3"})
    qkv_bias = None
    qk_norm = "head"


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
    }
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", ""):
        found["rope_scaling"] = {"rope_type": kind, "factor": key("rope.scaling.factor")}
    if factors := metadata.get(f"{arch}.rope.factors"):
        # A converter that has worked out each frequency's own factor (Llama 3.1) says of no other scaling.
        if "rope_scaling" in found:
            raise CheckpointError(
                "a GGUF file scales rotary frequencies twice",
                field=f"{arch}.rope.scaling.type",
                value=kind,
                remedy="convert the model again: factors of frequencies (rope_freqs.weight) stand for all of it",
            )
        found["rope_scaling"] = {"rope_type": "factors", "factors": factors}
    return found
