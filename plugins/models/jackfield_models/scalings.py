"""Where factors can be moved in a decoder: from the inputs of its projections to what comes before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jackfield.interfaces import Scaling
from jackfield_models.moe_parts import layer_experts

if TYPE_CHECKING:
    from jackfield_models.decoder import DecoderConfig

STREAMS = frozenset({"sequential", "parallel"})
"""Orders of a layer in which a norm feeds projections, and not the stream too."""


def scalings(config: DecoderConfig) -> Iterator[Scaling]:
    """Yield those of all layers."""
    for index in range(config.num_layers):
        yield from _of_layer(config, index)


def _of_layer(config: DecoderConfig, index: int) -> Iterator[Scaling]:
    path, norms = f"layers.{index}", config.norms_in(index)
    attends = config.mixing(index) is None and index not in config.no_mixer
    # Routers and experts take what the norm gives as well.
    dense = index not in config.no_mlp and layer_experts(config, index) is None
    up = f"{path}.gate_up" if config.gated else f"{path}.up"
    mixed = [f"{path}.qkv", *([f"{path}.gate"] if config.output_gate else [])] if attends else []
    one_norm = config.order == "parallel" and "post_norm" not in norms and index not in config.no_mlp
    if config.order in STREAMS and config.norm_weight:
        if "input_norm" in norms and attends and config.beside is None and (dense or not one_norm):
            after = (*mixed, up) if one_norm else tuple(mixed)
            yield Scaling(f"{path}.input_norm", after, offset=config.norm_offset)
        if "post_norm" in norms and dense:
            yield Scaling(f"{path}.post_norm", (up,), offset=config.norm_offset)
    # Heads that share values would need factors that they share; values that are cut off are not linear.
    if attends and config.num_heads == config.num_kv_heads and not config.clip:
        yield Scaling(f"{path}.qkv", (f"{path}.o",), shard="v")
    if dense and config.gated:
        yield Scaling(up, (f"{path}.down",), shard="up")
    elif dense and config.activation == "relu":
        yield Scaling(up, (f"{path}.down",))
