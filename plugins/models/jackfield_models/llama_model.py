"""The Llama decoder in torch. Legend: T tokens, E width, R rows that need logits, V vocabulary."""

from __future__ import annotations

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield_models.llama import LlamaConfig


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, index: int, config: LlamaConfig, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        path, width, size = f"layers.{index}", config.hidden_size, config.head_size
        heads = OutputShard("q", config.num_heads * size, size)
        kv = [OutputShard(s, config.num_kv_heads * size, size, may_replicate=True) for s in ("k", "v")]
        mlp = [OutputShard(s, config.intermediate_size) for s in ("gate", "up")]
        self.input_norm = ctx.norm(f"{path}.input_norm", width, config.norm_eps)
        self.qkv = ctx.linear(f"{path}.qkv", width, [heads, *kv], bias=config.qkv_bias, parallel=Parallel.COLUMN)
        self.q_norm = ctx.norm(f"{path}.q_norm", size, config.norm_eps) if config.qk_norm else None
        self.k_norm = ctx.norm(f"{path}.k_norm", size, config.norm_eps) if config.qk_norm else None
        rotary = ctx.rotary(
            size, theta=config.rope_theta, scaling=config.rope_scaling, max_position=config.max_position
        )
        self.attention = ctx.attention(index, group, rotary=rotary, q_norm=self.q_norm, k_norm=self.k_norm)
        self.o = ctx.linear(
            f"{path}.o",
            config.num_heads * size,
            width,
            bias=config.output_bias,
            parallel=Parallel.ROW,
            input_unit=size,
        )
        self.post_norm = ctx.norm(f"{path}.post_norm", width, config.norm_eps)
        self.gate_up = ctx.linear(f"{path}.gate_up", width, mlp, bias=config.mlp_bias, parallel=Parallel.COLUMN)
        self.activation = ctx.activation(config.activation)
        self.down = ctx.linear(
            f"{path}.down", config.intermediate_size, width, bias=config.mlp_bias, parallel=Parallel.ROW
        )
        for source, layer in (
            (self.input_norm, self.qkv),
            (self.post_norm, self.gate_up),
            (self.activation, self.down),
        ):
            source.feed(layer)

    def forward(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's contribution and the residual stream before it is added."""
        if residual_TE is None:
            normed_TE, residual_TE = self.input_norm(hidden_TE), hidden_TE
        else:
            normed_TE, residual_TE = self.input_norm.add(hidden_TE, residual_TE)
        mixed_TE = self.o(self.attention(self.qkv(normed_TE), positions_T, ctx))
        normed_TE, residual_TE = self.post_norm.add(mixed_TE, residual_TE)
        return self.down(self.activation(self.gate_up(normed_TE))), residual_TE


class LlamaModel(nn.Module):
    """Embedding, decoder layers, norm and head."""

    def __init__(self, config: LlamaConfig, groups: tuple[AttentionGroup, ...], ctx: BuildContext) -> None:
        super().__init__()
        group_of = {layer: group for group in groups for layer in group.layers}
        self.embedding = ctx.embedding("embed", config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(i, config, group_of[i], ctx) for i in range(config.num_layers))
        self.norm = ctx.norm("norm", config.hidden_size, config.norm_eps)
        tied = self.embedding if config.tie_embeddings else None
        self.head = ctx.head("head", config.vocab_size, config.hidden_size, tied=tied)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return input embeddings [T, E]."""
        rows: torch.Tensor = self.embedding(ids_T)
        return rows

    def forward(self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, E]."""
        residual_TE: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            hidden_TE, residual_TE = layer(hidden_TE, residual_TE, positions_T, ctx)
            if ctx.taps:
                ctx.tap(index, hidden_TE + residual_TE)
        final_TE, _ = self.norm.add(hidden_TE, residual_TE)
        out: torch.Tensor = final_TE
        return out

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V]."""
        rows: torch.Tensor = self.head(hidden_RE)
        return rows
