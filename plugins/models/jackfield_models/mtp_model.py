"""A layer that only drafts, in torch. Legend: T tokens, B sequences, E width, V vocabulary."""

from __future__ import annotations

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, TextModel
from jackfield_models.decoder import DecoderConfig
from jackfield_models.decoder_model import BLOCKS, enter


class NextModule(nn.Module):
    """Implements :class:`jackfield.interfaces.DraftLayers`: the token and the state, normalized each and projected
    together, one decoder layer, a norm. What comes out is a final state like the target's, so that the layer can go on
    from it.
    """

    def __init__(self, config: DecoderConfig, groups: tuple[AttentionGroup, ...], ctx: BuildContext) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.token_norm, self.state_norm, self.norm = (
            ctx.norm(name, width, config.norm_eps, kind=config.norm_kind, offset=config.norm_offset)
            for name in ("token_norm", "state_norm", "norm")
        )
        self.fc = ctx.linear("fc", 2 * width, width)
        group_of = {layer: group for group in groups for layer in group.layers}
        self.layer = BLOCKS[config.order](0, config, group_of, ctx)

    def fuse(self, features_TE: torch.Tensor) -> torch.Tensor:
        """See DraftLayers: the target's final states as they are."""
        return features_TE

    def forward(
        self, embeds_TE: torch.Tensor, features_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DraftLayers."""
        x_TE = self.fc(torch.cat((self.token_norm(embeds_TE), self.state_norm(features_TE)), -1))
        added_TE, residual_TE = self.layer(x_TE, None, positions_T, ctx)
        state_TE, _ = enter(self.norm, added_TE, residual_TE, wide=self.config.wide_stream)
        return state_TE, state_TE

    def logits(self, states_BE: torch.Tensor, target: TextModel) -> torch.Tensor:
        """See DraftLayers: by the target's head."""
        return target.logits(states_BE)
