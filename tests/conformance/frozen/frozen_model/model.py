"""The torch modules. T tokens, E width, R rows that need logits, V vocabulary."""

import torch
from torch import nn

from frozen_model.plugin import Config
from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, index: int, config: Config, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        path, width, size = f"layers.{index}", config.hidden_size, config.head_size
        q = OutputShard("q", config.num_heads * size, size)
        k, v = (OutputShard(name, config.num_kv_heads * size, size, may_replicate=True) for name in "kv")
        gate_up = [OutputShard(name, config.intermediate_size) for name in ("gate", "up")]
        rotary = ctx.rotary(size, theta=config.theta, scaling=None, max_position=config.max_position)
        self.input_norm = ctx.norm(f"{path}.input_norm", width, config.eps)
        self.qkv = ctx.linear(f"{path}.qkv", width, [q, k, v], parallel=Parallel.COLUMN)
        self.attention = ctx.attention(index, group, rotary=rotary)
        self.o = ctx.linear(f"{path}.o", q.size, width, parallel=Parallel.ROW, input_unit=size)
        self.post_norm = ctx.norm(f"{path}.post_norm", width, config.eps)
        self.gate_up = ctx.linear(f"{path}.gate_up", width, gate_up, parallel=Parallel.COLUMN)
        self.activation = ctx.activation("silu")
        self.down = ctx.linear(f"{path}.down", config.intermediate_size, width, parallel=Parallel.ROW)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x_TE = x_TE + self.o(self.attention(self.qkv(self.input_norm(x_TE)), positions_T, ctx))
        mixed_TE: torch.Tensor = self.down(self.activation(self.gate_up(self.post_norm(x_TE))))
        return x_TE + mixed_TE


class Model(nn.Module):
    """Embedding, layers, norm and head."""

    def __init__(self, config: Config, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        width = config.hidden_size
        self.embedding = ctx.embedding("embed", config.vocab_size, width)
        self.layers = nn.ModuleList(Layer(index, config, group, ctx) for index in range(config.num_layers))
        self.norm = ctx.norm("norm", width, config.eps)
        tied = self.embedding if config.tie_embeddings else None
        self.head = ctx.head("head", config.vocab_size, width, tied=tied)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embedding(ids_T)
        return found

    def forward(self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        for layer in self.layers:
            hidden_TE = layer(hidden_TE, positions_T, ctx)
        normed_TE: torch.Tensor = self.norm(hidden_TE)
        return normed_TE

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        found_RV: torch.Tensor = self.head(hidden_RE)
        return found_RV
