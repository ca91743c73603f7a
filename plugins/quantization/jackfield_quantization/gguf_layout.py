"""What GGUF files call the parts of a decoder, in which order they keep its rows, and how they say its sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import gguf
import numpy as np
from gguf import MODEL_ARCH, MODEL_TENSOR

from jackfield.errors import ConfigError, did_you_mean
from jackfield.interfaces import ModelSource
from jackfield.layers.rotary_scaling import kind_of, scaled_frequencies

Array = np.ndarray[Any, np.dtype[Any]]

ARCHITECTURES: Mapping[str, MODEL_ARCH] = {
    "LlamaForCausalLM": MODEL_ARCH.LLAMA,
    "MistralForCausalLM": MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": MODEL_ARCH.QWEN3,
}
"""What the format calls each HF architecture."""
PAIRED = frozenset({MODEL_ARCH.LLAMA})
"""Whose files keep the two features of a head next to each other that turn together."""
WINDOWED = {"MistralForCausalLM": True, "Qwen2ForCausalLM": False, "Qwen3ForCausalLM": False}
"""Whose ``sliding_window`` counts, and whether that is so without ``use_sliding_window``."""
ROPE_FACTORS = f"{gguf.TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]}.weight"
"""The tensor that says what each rotary frequency is divided by."""
YARN = {"beta_fast": (32, 32.0), "beta_slow": (1, 1.0), "truncate": (True,)}
"""Numbers of YaRN, and what readers of the format take for them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a file keeps a model.

    Args:
        arch: the format's architecture. config: keys of config.json. rope: HF's object with the scaling of rotary
            frequencies in it. more: tensors that the checkpoint does not have, float32, by name.
    """

    arch: MODEL_ARCH
    config: Mapping[str, Any]
    rope: Mapping[str, Any]
    more: Mapping[str, Array] = field(default_factory=dict)

    def size(self, key: str) -> int:
        """Return a size of the configuration.

        Raises:
            ConfigError: it is absent.
        """
        value = self.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(
                "the format needs a size that the model's configuration does not say",
                field=key,
                value=value,
                remedy=f"""say it with --hf-overrides '{{"{key}": ...}}'""",
            )
        return value

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.size("vocab_size")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Cache heads."""
        return int(self.config.get("num_key_value_heads") or self.heads)

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return int(self.config.get("head_dim") or self.size("hidden_size") // self.heads)

    @property
    def theta(self) -> float:
        """Base of the rotary frequencies."""
        return float(self.rope.get("rope_theta") or self.config.get("rope_theta") or 10000.0)

    def name(self, tensor: str) -> str:
        """Return what the format calls a tensor.

        Raises:
            ConfigError: it has no name for it.
        """
        names = gguf.get_tensor_name_map(self.arch, self.size("num_hidden_layers"))
        found: str | None = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if found is None:
            _refuse("has no place for a tensor", tensor, list(self.config.get("architectures") or ()))
        return found

    def rows(self, tensor: str, array: Array) -> Array:
        """Return a checkpoint's matrix [O, I] or bias [O] with its rows in the order of the format."""
        part = re.search(r"\.self_attn\.([qk])_proj\.(?:weight|bias)$", tensor)
        if part is None or self.arch not in PAIRED:
            return array
        heads = self.heads if part[1] == "q" else self.kv_heads
        return np.ascontiguousarray(array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2)).reshape(array.shape)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Write the sizes."""
        writer.add_vocab_size(self.vocab_size)
        writer.add_context_length(self.size("max_position_embeddings"))
        writer.add_embedding_length(self.size("hidden_size"))
        writer.add_block_count(self.size("num_hidden_layers"))
        writer.add_feed_forward_length(self.size("intermediate_size"))
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_layer_norm_rms_eps(float(self.config.get("rms_norm_eps") or 1e-6))
        writer.add_rope_dimension_count(self.head_size)
        writer.add_rope_freq_base(self.theta)
        kind = kind_of(self.rope)
        if kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(float(self.rope["factor"]))
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(self.size("max_position_embeddings"))


def layout_of(source: ModelSource) -> Layout:
    """Return how a file keeps a model.

    Raises:
        ConfigError: it cannot say what the model is.
    """
    arch, config = ARCHITECTURES.get(source.architecture), source.config
    if arch is None:
        raise ConfigError(
            "models of this architecture are not written as GGUF",
            field="architectures",
            value=source.architecture,
            remedy=did_you_mean(source.architecture, ARCHITECTURES) or f"written are {', '.join(ARCHITECTURES)}",
        )
    _check_plain(config)
    _check_windows(source.architecture, config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    layout = Layout(arch, config, rope)
    kind = kind_of(rope)
    if kind == "llama3" and MODEL_TENSOR.ROPE_FREQS in gguf.MODEL_TENSORS[arch]:
        return Layout(arch, config, rope, {ROPE_FACTORS: _factors(layout)})
    if kind not in ("default", "linear", "yarn") or any(isinstance(value, Mapping) for value in rope.values()):
        _refuse("cannot say a scaling of rotary frequencies", "rope_parameters", dict(rope))
    if kind == "yarn":
        _check_yarn(layout)
    return layout


def _factors(layout: Layout) -> Array:
    """Return what each rotary frequency is divided by, float32 [R/2]."""
    size, theta = layout.head_size, layout.theta
    scaled = scaled_frequencies(size, theta, layout.rope, layout.size("max_position_embeddings"))
    factors: Array = (scaled_frequencies(size, theta, None).double() / scaled.double()).float().numpy()
    return factors


def _check_plain(config: Mapping[str, Any]) -> None:
    """Refuse what the format has no key for: readers take it for given."""
    given = {
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1, 1.0),
        "dual_chunk_attention_config": (),
    }
    rope = config.get("rope_parameters") or {}
    for key, fit in given.items():
        for value in (config.get(key), rope.get(key)):
            if value is not None and value not in fit:
                _refuse("has no key for this", key, value)


def _check_windows(architecture: str, config: Mapping[str, Any]) -> None:
    window, types = config.get("sliding_window"), config.get("layer_types")
    layers = config.get("num_hidden_layers") or 0
    counts = WINDOWED.get(architecture)
    if counts is None or window is None or not (counts or config.get("use_sliding_window")):
        return
    if not counts:
        some = "sliding_attention" in types if types else (config.get("max_window_layers") or layers) < layers
        if not some:
            return
    if window < (config.get("max_position_embeddings") or 0):
        _refuse(
            "has no key for sliding windows of this architecture",
            "sliding_window",
            window,
            f"""for texts of at most {window} tokens, which no window cuts: """
            f"""--hf-overrides '{{"max_position_embeddings": {window}}}'""",
        )


def _check_yarn(layout: Layout) -> None:
    rope, longest = layout.rope, layout.size("max_position_embeddings")
    fit = {**YARN, "original_max_position_embeddings": (longest,)}
    for key in rope.keys() - {"rope_type", "type", "rope_theta", "factor", "finetuned", "partial_rotary_factor"}:
        if rope[key] is not None and rope[key] not in fit.get(key, ()):
            _refuse("is read without this number of YaRN", f"rope_parameters.{key}", rope[key])


def _refuse(what: str, key: str, value: object, remedy: str = "write another format, such as int8 or gptq") -> NoReturn:
    raise ConfigError(f"GGUF {what}", field=key, value=value, remedy=remedy)
