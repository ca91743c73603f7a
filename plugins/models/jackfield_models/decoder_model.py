"""The dense decoder in torch. Legend: T tokens, E width, R rows that need logits, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield.layers.functional import soft_cap
from jackfield_models.decoder import DecoderConfig

Stream = tuple[torch.Tensor, torch.Tensor | None]
"""What the last layer adds, and the residual stream before it is added; or the stream alone."""


class Mixer(nn.Module):
    """Attention with its projections."""

    def __init__(self, index: int, config: DecoderConfig, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        path, width, size = f"layers.{index}", config.hidden_size, config.head_size
        inner, rope = config.num_heads * size, config.ropes[index]
        q = OutputShard("q", inner, size)
        k, v = (OutputShard(s, config.num_kv_heads * size, size, may_replicate=True) for s in ("k", "v"))
        self.qkv = ctx.linear(f"{path}.qkv", width, [q, k, v], bias=config.qkv_bias, parallel=Parallel.COLUMN)
        self.q_norm, self.k_norm = (_head_norm(f"{path}.{s.name}_norm", s, config, ctx) for s in (q, k))
        rotary = None
        if rope is not None:
            rotary = ctx.rotary(rope.size, theta=rope.theta, scaling=rope.scaling, max_position=config.max_position)
        self.attention = ctx.attention(
            index, group, rotary=rotary, q_norm=self.q_norm, k_norm=self.k_norm, norm_last=config.qk_norm_last
        )
        self.o = ctx.linear(f"{path}.o", inner, width, bias=config.output_bias, parallel=Parallel.ROW, input_unit=size)
        self.clip = config.clip

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return what attention adds, [T, E]."""
        qkv = self.qkv(x_TE)
        if self.clip:
            qkv = qkv.clamp_(-self.clip, self.clip)
        mixed_TE: torch.Tensor = self.o(self.attention(qkv, positions_T, ctx))
        return mixed_TE


class Mlp(nn.Module):
    """Two projections with an activation between, gated or not."""

    def __init__(self, index: int, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        path, width, inner = f"layers.{index}", config.hidden_size, config.intermediate_size
        name = "gate_up" if config.gated else "up"
        shards = [OutputShard(s, inner) for s in (("gate", "up") if config.gated else ("",))]
        self.up = ctx.linear(f"{path}.{name}", width, shards, bias=config.mlp_bias, parallel=Parallel.COLUMN)
        self.activation = ctx.activation(config.activation, gated=config.gated)
        self.down = ctx.linear(f"{path}.down", inner, width, bias=config.mlp_bias, parallel=Parallel.ROW)
        self.activation.feed(self.down)

    def forward(self, x_TE: Any) -> torch.Tensor:
        """Return what the MLP adds, [T, E]."""
        out_TE: torch.Tensor = self.down(self.activation(self.up(x_TE)))
        return out_TE


class Block(nn.Module):
    """A decoder layer: norms, attention, norms, MLP, one after the other."""

    input_norm: Any
    attention_norm: Any
    post_norm: Any
    mlp_norm: Any

    def __init__(self, index: int, config: DecoderConfig, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        self.mixer, self.mlp = Mixer(index, config, group, ctx), Mlp(index, config, ctx)
        for name in ("input_norm", "attention_norm", "post_norm", "mlp_norm"):
            there = name in config.norms
            setattr(self, name, _norm(f"layers.{index}.{name}", config.hidden_size, config, ctx) if there else None)
        self.scale = config.residual_scale
        self.feed()

    def feed(self) -> None:
        """Tell each norm which linear layer alone takes its results."""
        for norm, layer in ((self.input_norm, self.mixer.qkv), (self.post_norm, self.mlp.up)):
            if norm is not None:
                norm.feed(layer)

    def forward(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> Stream:
        """Return the layer's contribution and the residual stream before it is added."""
        normed_TE, residual_TE = _enter(self.input_norm, hidden_TE, residual_TE)
        mixed_TE = self._added(self.mixer(normed_TE, positions_T, ctx), self.attention_norm)
        normed_TE, residual_TE = _enter(self.post_norm, mixed_TE, residual_TE)
        return self._added(self.mlp(normed_TE), self.mlp_norm), residual_TE

    def _added(self, x_TE: torch.Tensor, norm: Any) -> torch.Tensor:
        if norm is not None:
            x_TE = norm(x_TE)
        return x_TE if self.scale == 1.0 else x_TE * self.scale


class ParallelBlock(Block):
    """A layer whose attention and MLP see the same stream, each through a norm of its own or both through one."""

    def feed(self) -> None:
        """See Block: a norm that both take feeds none alone."""
        if self.post_norm is not None:
            super().feed()

    def forward(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> Stream:
        """See Block."""
        normed_TE, residual_TE = _enter(self.input_norm, hidden_TE, residual_TE)
        other_TE = normed_TE if self.post_norm is None else self.post_norm(residual_TE)
        mixed_TE = self.mixer(normed_TE, positions_T, ctx)
        return self._added(mixed_TE + self.mlp(other_TE), None), residual_TE


class SumBlock(Block):
    """A layer whose norms take the sum of the stream and what was added to it."""

    def forward(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> Stream:
        """See Block; the stream is returned alone."""
        hidden_TE = self.attention_norm(hidden_TE + self.mixer(hidden_TE, positions_T, ctx))
        out_TE: torch.Tensor = self.mlp_norm(hidden_TE + self.mlp(hidden_TE))
        return out_TE, None


BLOCKS: dict[str, type[Block]] = {"sequential": Block, "parallel": ParallelBlock, "sum": SumBlock}


class DecoderModel(nn.Module):
    """Embedding, decoder layers, norm and head."""

    def __init__(self, config: DecoderConfig, groups: tuple[AttentionGroup, ...], ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        group_of = {layer: group for group in groups for layer in group.layers}
        width, inner = config.embed_width, config.hidden_size
        self.embedding = ctx.embedding("embed", config.vocab_size, width)
        # The factor is rounded to the type of the embeddings, as models were trained.
        self.embed_scale = float(torch.tensor(config.embed_scale, dtype=ctx.dtype))
        self.embed_norm = _norm("embed_norm", width, config, ctx) if config.embed_norm else None
        self.project_in = self.project_out = None
        if width != inner:
            self.project_in = ctx.linear("project_in", width, inner)
            self.project_out = ctx.linear("project_out", inner, width)
        self.positions = ctx.embedding("positions", config.positions, inner) if config.positions else None
        block = BLOCKS[config.order]
        self.layers = nn.ModuleList(block(i, config, group_of[i], ctx) for i in range(config.num_layers))
        self.norm = _norm("norm", inner, config, ctx) if config.final_norm else None
        tied = self.embedding if config.tie_embeddings else None
        self.head = ctx.head("head", config.vocab_size, width, bias=config.head_bias, tied=tied)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return input embeddings [T, E]."""
        rows_TE: torch.Tensor = self.embedding(ids_T)
        if self.embed_scale != 1.0:
            rows_TE = rows_TE * self.embed_scale
        if self.embed_norm is not None:
            rows_TE = self.embed_norm(rows_TE)
        if self.project_in is not None:
            rows_TE = self.project_in(rows_TE)
        return rows_TE

    def forward(self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, E]."""
        if self.positions is not None:
            hidden_TE = hidden_TE + self.positions(positions_T + self.config.position_offset)
        residual_TE: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            hidden_TE, residual_TE = layer(hidden_TE, residual_TE, positions_T, ctx)
            if ctx.taps:
                ctx.tap(index, hidden_TE if residual_TE is None else hidden_TE + residual_TE)
        final_TE: torch.Tensor = _enter(self.norm, hidden_TE, residual_TE)[0]
        return final_TE

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V]."""
        narrow_RE = hidden_RE if self.project_out is None else self.project_out(hidden_RE)
        rows_RV: torch.Tensor = self.head(narrow_RE)
        if self.config.logit_scale != 1.0:
            rows_RV = rows_RV.mul_(self.config.logit_scale)
        return soft_cap(rows_RV, self.config.logit_softcap) if self.config.logit_softcap else rows_RV


def _enter(norm: Any, added_TE: torch.Tensor, residual_TE: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
    """Return (norm(x), x) of the stream x; ``norm`` may be None, and so may the part of x that is added."""
    total_TE = added_TE
    if norm is None:
        total_TE = added_TE if residual_TE is None else added_TE + residual_TE
        return total_TE, total_TE
    if residual_TE is None:
        return norm(added_TE), total_TE
    normed_TE, total_TE = norm.add(added_TE, residual_TE)
    return normed_TE, total_TE


def _norm(name: str, size: int, config: DecoderConfig, ctx: BuildContext) -> Any:
    return ctx.norm(
        name,
        size,
        config.norm_eps,
        kind=config.norm_kind,
        offset=config.norm_offset,
        weight=config.norm_weight,
        bias=config.norm_bias,
    )


def _head_norm(name: str, shard: OutputShard, config: DecoderConfig, ctx: BuildContext) -> Any:
    """Return the norm of queries or keys, or None."""
    size, eps, kind = config.head_size, config.norm_eps, config.qk_norm_kind
    if config.qk_norm == "head":
        return ctx.norm(name, size, eps, kind=kind, offset=config.norm_offset, bias=config.qk_norm_bias)
    if config.qk_norm:
        return ctx.norm(name, shard.size if config.qk_norm == "projection" else size, eps, kind=kind, over=shard)
    return None
