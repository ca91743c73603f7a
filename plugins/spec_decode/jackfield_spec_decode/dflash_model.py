"""DFlash's layers in torch. Legend: T tokens, E width, F width of all taps together, V vocabulary."""

from __future__ import annotations

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield_spec_decode.dflash import DFlashConfig
from jackfield_spec_decode.own_head import OwnHead


class DFlashLayer(nn.Module):
    """A decoder layer whose keys and values are made of two kinds of tokens."""

    def __init__(self, index: int, config: DFlashConfig, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        path, size, width, eps = f"layers.{index}", config.head_size, config.hidden_size, config.norm_eps
        inner, bias = config.num_heads * size, config.bias
        k, v = (OutputShard(name, config.num_kv_heads * size, size, may_replicate=True) for name in ("k", "v"))
        self._inner = ctx.local_heads(config.num_heads) * size
        # Of the context there are no queries, so that these have a projection of their own.
        self.q = ctx.linear(f"{path}.q", width, [OutputShard("q", inner, size)], bias=bias, parallel=Parallel.COLUMN)
        self.kv = ctx.linear(f"{path}.kv", width, [k, v], bias=bias, parallel=Parallel.COLUMN)
        self.q_norm, self.k_norm = (ctx.norm(f"{path}.{part}_norm", size, eps) for part in "qk")
        self.attention = ctx.attention(
            index,
            group,
            rotary=ctx.rotary(size, theta=config.theta, scaling=config.scaling, max_position=config.max_position),
            q_norm=self.q_norm,
            k_norm=self.k_norm,
        )
        self.o = ctx.linear(f"{path}.o", inner, width, bias=bias, parallel=Parallel.ROW, input_unit=size)
        self.input_norm, self.post_norm = (ctx.norm(f"{path}.{part}_norm", width, eps) for part in ("input", "post"))
        shards = [OutputShard(name, config.intermediate_size) for name in ("gate", "up")]
        self.up = ctx.linear(f"{path}.gate_up", width, shards, bias=config.mlp_bias, parallel=Parallel.COLUMN)
        self.activation = ctx.activation("silu")
        self.down = ctx.linear(
            f"{path}.down", config.intermediate_size, width, bias=config.mlp_bias, parallel=Parallel.ROW
        )
        self.post_norm.feed(self.up)
        self.activation.feed(self.down)

    def remember(self, context_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> None:
        """Store keys and values of the context; ``ctx`` attends to nothing."""
        kv_TN = self.kv(context_TE)
        self.attention(torch.cat((kv_TN.new_zeros(len(kv_TN), self._inner), kv_TN), -1), positions_T, ctx)

    def forward(
        self, added_TE: torch.Tensor | None, stream_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer's last part adds to the residual stream, and the stream before that, from the same of
        the layer before.
        """
        if added_TE is None:
            normal_TE = self.input_norm(stream_TE)
        else:
            normal_TE, stream_TE = self.input_norm.add(added_TE, stream_TE)
        qkv_TN = torch.cat((self.q(normal_TE), self.kv(normal_TE)), -1)
        mixed_TE = self.o(self.attention(qkv_TN, positions_T, ctx))
        normal_TE, stream_TE = self.post_norm.add(mixed_TE, stream_TE)
        return self.down(self.activation.of(self.up, normal_TE)), stream_TE


class DFlashModule(OwnHead):
    """All layers, and what makes the context of the target's states. The head is the target's, or over some tokens."""

    def __init__(self, config: DFlashConfig, group: AttentionGroup, ctx: BuildContext) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.fc = ctx.linear("fc", len(config.taps) * width, width)
        self.hidden_norm = ctx.norm("hidden_norm", width, config.norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(i, config, group, ctx) for i in range(config.num_layers))
        self.norm = ctx.norm("norm", width, config.norm_eps)
        if config.draft_vocab:
            self.make_head(config.draft_vocab, config.vocab_size, width, ctx)

    def remember(self, features_TF: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> None:
        """Store the context of tokens whose states the target gave; ``ctx`` attends to nothing."""
        context_TE = self.hidden_norm(self.fc(features_TF))
        for layer in self.layers:
            layer.remember(context_TE, positions_T, ctx)  # type: ignore[operator]

    def forward(self, embeds_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return states [T, E] for the target's head, one behind each token of the blocks."""
        added_TE, stream_TE = None, embeds_TE
        for layer in self.layers:
            added_TE, stream_TE = layer(added_TE, stream_TE, positions_T, ctx)
        states_TE: torch.Tensor = self.norm.add(added_TE, stream_TE)[0]
        return states_TE

    def logits(self, states_BE: torch.Tensor, target: nn.Module) -> torch.Tensor:
        """See OwnHead."""
        if self.config.draft_vocab:
            return super().logits(states_BE, target)
        logits_BV: torch.Tensor = target.logits(states_BE)  # type: ignore[operator]
        return logits_BV

    def likeliest(self, states_BE: torch.Tensor, target: nn.Module) -> torch.Tensor:
        """See OwnHead."""
        if self.config.draft_vocab:
            return super().likeliest(states_BE, target)
        return self.logits(states_BE, target).argmax(-1)
