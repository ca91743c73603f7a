"""Writes a tiny HF model as GGUF, and puts what a GGUF file holds back into an HF model, by gguf-py alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """Return the GGUF name of an HF parameter of a Llama-like decoder."""
    module, _, suffix = name.rpartition(".")
    if module in TOP_NAMES:
        return f"{TOP_NAMES[module]}.{suffix}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{suffix}"


def write_gguf(
    model: Any,
    path: Path,
    arch: str,
    kind: gguf.GGMLQuantizationType,
    factors: np.ndarray | None = None,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
) -> None:
    """Write ``model``; matrices are stored as ``kind``, all else as float32. ``factors``: what each rotary frequency is
    divided by. ``more``: adds further metadata.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, parameter in model.named_parameters():
        array = rows_in_pairs(name, parameter.detach().numpy(), config, arch)
        stored = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, stored), raw_dtype=stored)
    if more is not None:
        more(writer)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fill_from_gguf(model: Any, path: Path, arch: str) -> None:
    """Set every parameter of ``model`` to what the file holds."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored.pop(gguf_name(name))
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            parameter.copy_(torch.from_numpy(rows_in_halves(name, array.copy(), model.config, arch)))
    assert not stored, f"the model has no place for {sorted(stored)}"


def head_size(config: Any) -> int:
    """Return the size of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rows_in_pairs(name: str, array: np.ndarray[Any, Any], config: Any, arch: str) -> np.ndarray[Any, Any]:
    """Return q and k rows as GGUF's llama keeps them: row i of a head's first half beside row i of its second."""
    heads = _rotated_heads(name, config, arch)
    if not heads:
        return array
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(np.stack((halves[:, 0], halves[:, 1]), axis=2).reshape(array.shape))


def rows_in_halves(name: str, array: np.ndarray[Any, Any], config: Any, arch: str) -> np.ndarray[Any, Any]:
    """Undo :func:`rows_in_pairs`: even rows of a head first, then odd ones."""
    heads = _rotated_heads(name, config, arch)
    if not heads:
        return array
    pairs = array.reshape(heads, -1, *array.shape[1:])
    return np.ascontiguousarray(np.concatenate((pairs[:, 0::2], pairs[:, 1::2]), axis=1).reshape(array.shape))


def _rotated_heads(name: str, config: Any, arch: str) -> int:
    if arch != "llama":
        return 0
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else 0
