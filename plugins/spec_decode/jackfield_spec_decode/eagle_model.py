"""EAGLE's layers in torch. Legend: T tokens, B sequences, E width, F width of features, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield_spec_decode.eagle import EagleConfig, usual_taps
from jackfield_spec_decode.own_head import OwnHead

Result = tuple[torch.Tensor, torch.Tensor]
"""Features [T, E] to go on from, and states [T, E] for the head."""


class EagleLayer(nn.Module):
    """A decoder layer whose attention takes inputs of ``width`` features."""

    def __init__(self, index: int, width: int, config: EagleConfig, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        path, size, hidden = f"layers.{index}", config.head_size, config.hidden_size
        inner = config.num_heads * size
        q = OutputShard("q", inner, size)
        k, v = (OutputShard(name, config.num_kv_heads * size, size, may_replicate=True) for name in ("k", "v"))
        self.qkv = ctx.linear(f"{path}.qkv", width, [q, k, v], bias=config.bias, parallel=Parallel.COLUMN)
        rotary = ctx.rotary(size, theta=config.theta, scaling=config.scaling, max_position=config.max_position)
        self.attention = ctx.attention(index, group, rotary=rotary)
        self.o = ctx.linear(f"{path}.o", inner, hidden, bias=config.bias, parallel=Parallel.ROW, input_unit=size)
        self.post_norm = ctx.norm(f"{path}.post_norm", hidden, config.norm_eps)
        shards = [OutputShard(name, config.intermediate_size) for name in ("gate", "up")]
        self.up = ctx.linear(f"{path}.gate_up", hidden, shards, bias=config.mlp_bias, parallel=Parallel.COLUMN)
        self.activation = ctx.activation("silu")
        self.down = ctx.linear(
            f"{path}.down", config.intermediate_size, hidden, bias=config.mlp_bias, parallel=Parallel.ROW
        )
        self.post_norm.feed(self.up)
        self.activation.feed(self.down)

    def forward(
        self, x_TW: torch.Tensor, residual_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer's last part adds to the residual stream, and the stream before that, from what
        attention takes and the stream before the layer.
        """
        mixed_TE = self.o(self.attention(self.qkv(x_TW), positions_T, ctx))
        normal_TE, stream_TE = self.post_norm.add(mixed_TE, residual_TE)
        return self.down(self.activation.of(self.up, normal_TE)), stream_TE


class EagleModule(nn.Module):
    """EAGLE-1: features are the target's final states."""

    def __init__(self, config: EagleConfig, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.fc = ctx.linear("fc", 2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList(EagleLayer(i, width, config, group, ctx) for i in range(config.num_layers))
        self.norms = nn.ModuleList(
            ctx.norm(f"layers.{i}.input_norm", width, config.norm_eps) for i in range(1, config.num_layers)
        )

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return which of the target's layers are looked at: none but the last."""
        return ()

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return features [T, E] of what the target gave."""
        return features_TF

    def forward(
        self, embeds_TE: torch.Tensor, features_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> Result:
        """Return features and states behind each token: ``embeds`` are of the tokens behind those of ``features``."""
        x_TE = self.fc(torch.cat((embeds_TE, features_TE), -1))
        for index, layer in enumerate(self.layers):
            normal_TE = x_TE if index == 0 else self.norms[index - 1](x_TE)
            added_TE, stream_TE = layer(normal_TE, x_TE, positions_T, ctx)
            x_TE = stream_TE + added_TE
        return x_TE, x_TE

    def logits(self, states_BE: torch.Tensor, target: nn.Module) -> torch.Tensor:
        """Return logits [B, V] by the target's head."""
        logits_BV: torch.Tensor = target.logits(states_BE)  # type: ignore[operator]
        return logits_BV

    def likeliest(self, states_BE: torch.Tensor, target: nn.Module) -> torch.Tensor:
        """Return [B] the tokens with the largest logits."""
        return self.logits(states_BE, target).argmax(-1)


class Eagle3Module(OwnHead, EagleModule):
    """EAGLE-3: features are made of the states of three layers, and the head has a vocabulary of its own.

    ``embed`` is its own embedding, or None where it shares the target's.
    """

    def __init__(self, config: EagleConfig, group: AttentionGroup, ctx: BuildContext) -> None:
        nn.Module.__init__(self)
        self.config, width, eps = config, config.hidden_size, config.norm_eps
        count = len(config.taps) or 3
        self.taps_norm = ctx.norm("taps_norm", count * config.feature_size, eps) if config.normed_taps else None
        self.fc = ctx.linear("fc", count * config.feature_size, width, bias=False)
        self.input_norm = ctx.norm("layers.0.input_norm", width, eps)
        self.hidden_norm = ctx.norm("layers.0.hidden_norm", width, eps)
        self.layer = EagleLayer(0, 2 * width, config, group, ctx)
        more = range(1, config.num_layers)
        self.norms = nn.ModuleList(ctx.norm(f"layers.{i}.input_norm", width, eps) for i in more)
        self.layers = nn.ModuleList(EagleLayer(i, width, config, group, ctx) for i in more)
        self.norm = ctx.norm("norm", width, eps)
        self.make_head(config.draft_vocab, config.vocab_size, width, ctx)
        self.embed: Any = None
        self.mask_hidden: Any = None
        if config.own_embed:
            self.embed = ctx.embedding("embed", config.vocab_size, width)
        if config.mask_token is not None:
            self.mask_hidden = ctx.parameters("mask_hidden", {"weight": config.mask_shape})

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return which of the target's ``layers`` are looked at: an early, a middle and a late one."""
        behind = self.config.taps or usual_taps(layers)
        return tuple(layer - 1 for layer in behind)

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """See EagleModule."""
        fused_TE: torch.Tensor = self.fc(features_TF if self.taps_norm is None else self.taps_norm(features_TF))
        return fused_TE

    def unknown(self) -> Result:
        """Return what stands for the embedding of an unknown token and for its features, [1, E] each; for modules that
        draft in parallel.
        """
        assert self.embed is not None and self.mask_hidden is not None, "it drafts one token after another"
        weight = self.mask_hidden.weight
        return self.embed(torch.tensor([self.config.mask_token], device=weight.device)), self.fuse(weight.view(1, -1))

    def forward(
        self, embeds_TE: torch.Tensor, features_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> Result:
        """See EagleModule."""
        normed_TE = self.hidden_norm(features_TE)
        x_TW = torch.cat((self.input_norm(embeds_TE), normed_TE), -1)
        residual_TE = normed_TE if self.config.normed_stream else features_TE
        added_TE, stream_TE = self.layer(x_TW, residual_TE, positions_T, ctx)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            normal_TE, stream_TE = norm.add(added_TE, stream_TE)  # type: ignore[operator]
            added_TE, stream_TE = layer(normal_TE, stream_TE, positions_T, ctx)
        normal_TE, stream_TE = self.norm.add(added_TE, stream_TE)
        return stream_TE, normal_TE
