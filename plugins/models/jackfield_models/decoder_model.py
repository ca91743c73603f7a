"""The dense decoder in torch. Legend: T tokens, E width, R rows that need logits, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield.layers.functional import soft_cap
from jackfield_models.decoder import DecoderConfig, Scores
from jackfield_models.delta_mixer import DeltaMixer
from jackfield_models.kimi_mixer import KimiMixer
from jackfield_models.linear_mixer import LinearMixer
from jackfield_models.mamba_mixers import Mamba1Mixer, Mamba2Mixer
from jackfield_models.mla_mixer import IndexedMixer, LatentMixer
from jackfield_models.moe_model import SparseMlp
from jackfield_models.moe_parts import layer_experts
from jackfield_models.names import MLP_PARTS
from jackfield_models.short_conv_mixer import ShortConvMixer

Groups = Mapping[int, AttentionGroup]
"""Of each layer that mixes tokens."""
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
        self.q_norm = self.k_norm = None
        if rope is not None or not config.qk_norm_turned:
            self.q_norm, self.k_norm = (_head_norm(f"{path}.{s.name}_norm", s, config, ctx) for s in (q, k))
        rotary = None
        if rope is not None:
            rotary = ctx.rotary(
                rope.size,
                theta=rope.theta,
                scaling=rope.scaling,
                max_position=config.max_position,
                heads=config.num_kv_heads,
                reach=0 if config.chunks is None else config.chunks.reach + 1,
            )
        self.sinks = None
        if config.sinks:
            heads = config.num_heads
            self.sinks = ctx.parameters(f"{path}.sinks", {"weight": (heads,)}, shards=[OutputShard("", heads)])
        self.attention = ctx.attention(
            index,
            group,
            rotary=rotary,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            norm_last=config.qk_norm_last,
            sinks=self.sinks,
        )
        self.temperature = config.temperature if rope is None else None
        self.q_size = ctx.local_heads(config.num_heads) * size
        self.o = ctx.linear(f"{path}.o", inner, width, bias=config.output_bias, parallel=Parallel.ROW, input_unit=size)
        self.clip = config.clip
        self.gate = None
        if config.output_gate:
            self.gate = ctx.linear(f"{path}.gate", width, [replace(q, name="")], parallel=Parallel.COLUMN)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return what attention adds, [T, E]."""
        qkv = self.qkv(x_TE)
        if self.clip:
            qkv = qkv.clamp_(-self.clip, self.clip)
        if self.temperature is not None:
            q_TN = qkv[:, : self.q_size]
            q_TN.copy_(q_TN * _temper(positions_T, *self.temperature).unsqueeze(1))
        attended = self.attention(qkv, positions_T, ctx)
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate(x_TE))
        mixed_TE: torch.Tensor = self.o(attended)
        return mixed_TE


MIXERS: dict[str, Callable[..., nn.Module]] = {
    "gdn": DeltaMixer,
    "kda": KimiMixer,
    "linear": LinearMixer,
    "mla": LatentMixer,
    "mla_sparse": IndexedMixer,
    "mamba1": Mamba1Mixer,
    "mamba2": Mamba2Mixer,
    "short_conv": ShortConvMixer,
}
"""What mixes tokens instead of attention, by the kind of its group: (layer, path, width, sizes, group, ctx)."""


class Both(nn.Module):
    """Attention, and something else that mixes tokens beside it."""

    def __init__(self, index: int, config: DecoderConfig, groups: Groups, ctx: BuildContext) -> None:
        super().__init__()
        beside = config.beside
        assert beside is not None
        other = config.num_layers + index
        self.attention = Mixer(index, config, groups[index], ctx)
        path, width, mixing = f"layers.{index}.mixer", config.hidden_size, beside.mixing
        self.beside = MIXERS[mixing.kind](other, path, width, mixing, groups[other], ctx)
        self._in, self._out = beside.attention_in, beside.attention_out
        self._beside_in, self._beside_out = beside.mixing_in, beside.mixing_out

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return what both add, [T, E]."""
        attended_TE = self.attention(x_TE * self._in, positions_T, ctx) * self._out
        other_TE = self.beside(x_TE * self._beside_in, positions_T, ctx) * self._beside_out
        return attended_TE + other_TE  # type: ignore[no-any-return]


def mixer(index: int, config: DecoderConfig, groups: Groups, ctx: BuildContext) -> nn.Module | None:
    """Return what mixes tokens in a layer, or None."""
    if index in config.no_mixer:
        return None
    if config.beside is not None:
        return Both(index, config, groups, ctx)
    mixing, group = config.mixing(index), groups[index]
    if mixing is None:
        return Mixer(index, config, group, ctx)
    return MIXERS[mixing.kind](index, f"layers.{index}.mixer", config.hidden_size, mixing, group, ctx)


class Mlp(nn.Module):
    """Two projections with an activation between, gated or not. ``part`` is where in the layer, ``inner`` the size
    between them, if not the layer's own.
    """

    def __init__(self, index: int, config: DecoderConfig, ctx: BuildContext, part: str = "", inner: int = 0) -> None:
        super().__init__()
        path, width, inner = f"layers.{index}{part}", config.hidden_size, inner or config.intermediate_size
        name = "gate_up" if config.gated else "up"
        shards = [OutputShard(s, inner) for s in (("gate", "up") if config.gated else ("",))]
        self.up = ctx.linear(f"{path}.{name}", width, shards, bias=config.mlp_bias, parallel=Parallel.COLUMN)
        self.activation = ctx.activation(config.activation, gated=config.gated)
        self.down = ctx.linear(f"{path}.down", inner, width, bias=config.mlp_bias, parallel=Parallel.ROW)
        self.activation.feed(self.down)
        self.factors, self._gate = config.mlp_factors, self.up.info.local_output_sizes[0]

    def forward(self, x_TE: Any) -> torch.Tensor:
        """Return what the MLP adds, [T, E]."""
        if self.factors is None:
            plain_TE: torch.Tensor = self.down(self.activation.of(self.up, x_TE))
            return plain_TE
        up_TF = self.up(x_TE)
        up_TF[:, : self._gate] *= self.factors[0]
        out_TE: torch.Tensor = self.down(self.activation(up_TF)) * self.factors[1]
        return out_TE


def mlp(index: int, config: DecoderConfig, ctx: BuildContext) -> nn.Module | None:
    """Return a layer's MLP, or its experts, or None."""
    if index in config.no_mlp:
        return None
    sparse = layer_experts(config, index)
    if sparse is None:
        return Mlp(index, config, ctx)
    shared = Mlp(index, config, ctx, ".shared", sparse.shared_size) if sparse.shared_size else None
    return SparseMlp(f"layers.{index}", config.hidden_size, sparse, ctx, shared)


class Block(nn.Module):
    """A decoder layer: norms, attention, norms, MLP, one after the other."""

    input_norm: Any
    attention_norm: Any
    post_norm: Any
    mlp_norm: Any
    mixer: Any
    mlp: Any

    def __init__(self, index: int, config: DecoderConfig, groups: Groups, ctx: BuildContext) -> None:
        super().__init__()
        self.mixer = mixer(index, config, groups, ctx)
        self.mlp = mlp(index, config, ctx)
        self.wide = config.wide_stream
        norms = config.norms_in(index)
        for name in ("input_norm", "attention_norm", "post_norm", "mlp_norm"):
            there = name in norms and (self.mlp is not None or name not in MLP_PARTS)
            setattr(self, name, _norm(f"layers.{index}.{name}", config.hidden_size, config, ctx) if there else None)
        self.scale = config.residual_scale
        self.feed()

    def feed(self) -> None:
        """Tell each norm which linear layer alone takes its results."""
        if isinstance(self.mixer, Mixer) and self.mixer.gate is None and self.input_norm is not None:
            self.input_norm.feed(self.mixer.qkv)
        if isinstance(self.mlp, Mlp) and self.post_norm is not None:
            self.post_norm.feed(self.mlp.up)

    def forward(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> Stream:
        """Return the layer's contribution and the residual stream before it is added."""
        if self.mixer is not None:
            normed_TE, residual_TE = enter(self.input_norm, hidden_TE, residual_TE, wide=self.wide)
            hidden_TE = self._added(self.mixer(normed_TE, positions_T, ctx), self.attention_norm)
        if self.mlp is None:
            return hidden_TE, residual_TE
        normed_TE, residual_TE = enter(self.post_norm, hidden_TE, residual_TE, wide=self.wide)
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
        normed_TE, residual_TE = enter(self.input_norm, hidden_TE, residual_TE)
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


class WeightedBlock(Block):
    """A layer whose norms give the stream itself, to which weighted results are added."""

    def __init__(self, index: int, config: DecoderConfig, groups: Groups, ctx: BuildContext) -> None:
        super().__init__(index, config, groups, ctx)
        self._weights = config.residual_weights[index]

    def forward(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> Stream:
        """See Block; the stream is returned alone."""
        stream, added, mlp_stream, mlp_added = self._weights
        normed_TE = self.input_norm(hidden_TE)
        normed_TE = self.post_norm(normed_TE * stream + self.mixer(normed_TE, positions_T, ctx) * added)
        return normed_TE * mlp_stream + self.mlp(normed_TE) * mlp_added, None

    def feed(self) -> None:
        """Norms feed the stream too."""


BLOCKS: dict[str, type[Block]] = {
    "sequential": Block,
    "parallel": ParallelBlock,
    "sum": SumBlock,
    "weighted": WeightedBlock,
}


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
        self.layers = nn.ModuleList(block(i, config, group_of, ctx) for i in range(config.num_layers))
        self.norm = _norm("norm", inner, config, ctx) if config.final_norm else None
        tied = self.embedding if config.tie_embeddings else None
        self.scores = None if config.scores is None else ScoreHead(config.scores, inner, ctx)
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
            if index in ctx.taps:
                ctx.tap(index, hidden_TE if residual_TE is None else hidden_TE + residual_TE)
        final_TE: torch.Tensor = enter(self.norm, hidden_TE, residual_TE, wide=self.config.wide_stream)[0]
        return final_TE

    def classify(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return scores [R, L] of labels."""
        assert self.scores is not None, "a model without labels is never asked for them"
        scores_RL: torch.Tensor = self.scores(hidden_RE)
        return scores_RL

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V]."""
        narrow_RE = hidden_RE if self.project_out is None else self.project_out(hidden_RE)
        rows_RV: torch.Tensor = self.head(narrow_RE)
        if self.config.logit_scale != 1.0:
            rows_RV = rows_RV.mul_(self.config.logit_scale)
        return soft_cap(rows_RV, self.config.logit_softcap) if self.config.logit_softcap else rows_RV


class ScoreHead(nn.Module):
    """Projections to labels, with a ReLU between."""

    def __init__(self, scores: Scores, width: int, ctx: BuildContext) -> None:
        super().__init__()
        last = len(scores.sources) - 1
        sizes = [width] * last + [scores.labels]
        self.layers = nn.ModuleList(
            ctx.linear(f"scores.{i}", width, size, bias=scores.bias) for i, size in enumerate(sizes)
        )

    def forward(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return scores [R, L]."""
        for index, layer in enumerate(self.layers):
            hidden_RE = layer(torch.relu(hidden_RE) if index else hidden_RE)
        return hidden_RE


def enter(
    norm: Any, added_TE: torch.Tensor, residual_TE: torch.Tensor | None, *, wide: bool = False
) -> tuple[Any, torch.Tensor]:
    """Return (norm(x), x) of the stream x; ``norm`` may be None, and so may the part of x that is added. ``wide``: x is
    float32 at least, and normalized in the type of what was added.
    """
    if residual_TE is not None and norm is not None and not wide:
        pair: tuple[Any, torch.Tensor] = norm.add(added_TE, residual_TE)
        return pair
    total_TE = added_TE if residual_TE is None else added_TE + residual_TE
    narrow_TE = total_TE.to(added_TE.dtype)
    if wide:
        total_TE = total_TE.to(torch.promote_types(total_TE.dtype, torch.float32))
    return (narrow_TE if norm is None else norm(narrow_TE)), total_TE


def _temper(positions_T: torch.Tensor, floor: float, scale: float) -> torch.Tensor:
    """Return the factor [T] on queries; see DecoderConfig."""
    return torch.log1p(torch.floor((positions_T.float() + 1.0) / floor)) * scale + 1.0


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
        return ctx.norm(
            name,
            size,
            eps,
            kind=kind,
            offset=config.norm_offset,
            weight=config.qk_norm_weight,
            bias=config.qk_norm_bias,
        )
    if config.qk_norm:
        return ctx.norm(name, shard.size if config.qk_norm == "projection" else size, eps, kind=kind, over=shard)
    return None
