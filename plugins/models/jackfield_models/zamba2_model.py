"""Zamba2 in torch. Legend: T tokens, E width, F inner size of an MLP, R rows that need logits, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield_models.decoder_model import MIXERS
from jackfield_models.zamba2 import Zamba2Config

COLUMN, ROW = Parallel.COLUMN, Parallel.ROW


class SharedBlock(nn.Module):
    """A transformer block over what comes in beside the embeddings, without a stream of its own."""

    def __init__(self, path: str, config: Zamba2Config, ctx: BuildContext) -> None:
        super().__init__()
        width, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.input_norm = ctx.norm(f"{path}.input_norm", 2 * width, eps)
        self.qkv = ctx.linear(f"{path}.qkv", 2 * width, heads_of(config), parallel=COLUMN)
        size = config.head_size
        self.o = ctx.linear(f"{path}.o", config.num_heads * size, width, parallel=ROW, input_unit=size)
        self.mlp_norm = ctx.norm(f"{path}.mlp_norm", width, eps)
        self.up = ctx.linear(f"{path}.gate_up", width, halves_of(config), bias=config.mlp_bias, parallel=COLUMN)
        self.activation = ctx.activation(config.activation)
        self.down = ctx.linear(f"{path}.down", inner, width, bias=config.mlp_bias, parallel=ROW)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, use: Use, ctx: ForwardContext) -> torch.Tensor:
        """Return the block's result for one of its uses; ``x`` is [T, 2 E]."""
        normed_TE = self.input_norm(x_TE)
        qkv = self.qkv(normed_TE)
        if use.qkv_down is not None:
            qkv = qkv + use.attention_adapters(normed_TE)
        mixed_TE = self.mlp_norm(self.o(use.attention(qkv, positions_T, ctx)))
        up_TF = self.up(mixed_TE) + use.mlp_up(use.mlp_down(mixed_TE))
        out_TE: torch.Tensor = self.down(self.activation(up_TF))
        return out_TE


class Use(nn.Module):
    """What a use of a shared block has alone: a cache, adapters, and a projection of the result."""

    def __init__(self, number: int, config: Zamba2Config, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        path, width, rank = f"uses.{number}", config.hidden_size, config.rank
        layer, rope, rotary = config.uses[number], config.ropes[0], None
        if rope is not None:
            rotary = ctx.rotary(rope.size, theta=rope.theta, scaling=rope.scaling, max_position=config.max_position)
        self.attention = ctx.attention(config.num_layers + layer, group, rotary=rotary)
        self.qkv_down = None
        self.ups = nn.ModuleList()
        if config.attention_adapters:
            self.qkv_down = ctx.linear(f"{path}.qkv_down", 2 * width, [OutputShard(name, rank) for name in "qkv"])
            for shard in heads_of(config):
                whole = OutputShard("", shard.size, shard.unit, may_replicate=shard.may_replicate)
                self.ups.append(ctx.linear(f"{path}.{shard.name}_up", rank, [whole], parallel=COLUMN))
        self.mlp_down = ctx.linear(f"{path}.mlp_down", width, rank)
        self.mlp_up = ctx.linear(f"{path}.mlp_up", rank, halves_of(config), parallel=COLUMN)
        self.out = ctx.linear(f"{path}.out", width, width)

    def attention_adapters(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Return what adapters add to queries, keys and values."""
        assert self.qkv_down is not None
        narrow = self.qkv_down(x_TE).chunk(3, -1)
        return torch.cat([up(part.contiguous()) for up, part in zip(self.ups, narrow, strict=True)], -1)


class StateLayer(nn.Module):
    """A norm and a Mamba-2 layer; what a shared block gives is seen by both, and is no part of the stream."""

    def __init__(self, index: int, config: Zamba2Config, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        path, mixing = f"layers.{index}", config.mixing(index)
        assert mixing is not None
        self.norm = ctx.norm(f"{path}.norm", config.hidden_size, config.norm_eps)
        self.mixer = MIXERS[mixing.kind](index, f"{path}.mixer", config.hidden_size, mixing, group, ctx)

    def forward(
        self, stream_TE: torch.Tensor, beside_TE: torch.Tensor | None, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Return the stream behind the layer."""
        seen_TE = stream_TE if beside_TE is None else stream_TE + beside_TE
        added_TE: torch.Tensor = self.mixer(self.norm(seen_TE), positions_T, ctx)
        return stream_TE + added_TE


class Zamba2Model(nn.Module):
    """Embedding, Mamba-2 layers, shared blocks, norm and head."""

    def __init__(self, config: Zamba2Config, groups: tuple[AttentionGroup, ...], ctx: BuildContext) -> None:
        super().__init__()
        group_of = {layer: group for group in groups for layer in group.layers}
        count, width = config.num_layers, config.hidden_size
        self.embedding = ctx.embedding("embed", config.vocab_size, width)
        self.layers = nn.ModuleList(StateLayer(i, config, group_of[i], ctx) for i in range(count))
        self.blocks = nn.ModuleList(SharedBlock(f"blocks.{i}", config, ctx) for i in range(config.blocks))
        self.uses = nn.ModuleList(
            Use(number, config, group_of[count + layer], ctx) for number, layer in enumerate(config.uses)
        )
        self._number_of = {layer: number for number, layer in enumerate(config.uses)}
        self.norm = ctx.norm("norm", width, config.norm_eps)
        self.head = ctx.head("head", config.vocab_size, width, tied=self.embedding)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return input embeddings [T, E]."""
        rows_TE: torch.Tensor = self.embedding(ids_T)
        return rows_TE

    def forward(self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, E]."""
        stream_TE = hidden_TE
        for index, layer in enumerate(self.layers):
            beside_TE = self._beside(index, stream_TE, hidden_TE, positions_T, ctx)
            stream_TE = layer(stream_TE, beside_TE, positions_T, ctx)
            if ctx.taps:
                ctx.tap(index, stream_TE)
        final_TE: torch.Tensor = self.norm(stream_TE)
        return final_TE

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V]."""
        rows_RV: torch.Tensor = self.head(hidden_RE)
        return rows_RV

    def _beside(
        self,
        index: int,
        stream_TE: torch.Tensor,
        embedded_TE: torch.Tensor,
        positions_T: torch.Tensor,
        ctx: ForwardContext,
    ) -> Any:
        """Return what a shared block gives in front of a layer, or None where none is used."""
        number = self._number_of.get(index)
        if number is None:
            return None
        use: Any = self.uses[number]
        block = self.blocks[number % len(self.blocks)]
        return use.out(block(torch.cat((stream_TE, embedded_TE), -1), positions_T, use, ctx))


def heads_of(config: Zamba2Config) -> list[OutputShard]:
    """Return queries, keys and values as outputs of a projection."""
    size = config.head_size
    keys = [OutputShard(name, config.num_kv_heads * size, size, may_replicate=True) for name in "kv"]
    return [OutputShard("q", config.num_heads * size, size), *keys]


def halves_of(config: Zamba2Config) -> list[OutputShard]:
    """Return gate and up as outputs of a projection."""
    return [OutputShard(name, config.intermediate_size) for name in ("gate", "up")]
