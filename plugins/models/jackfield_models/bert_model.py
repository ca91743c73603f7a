"""The encoder in torch. Legend: T tokens, E width, R pooled rows, L labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext
from jackfield_models.bert import EncoderConfig
from jackfield_models.decoder_model import BLOCKS


class EncoderModel(nn.Module):
    """Embeddings of tokens, positions and types, layers, and a head over labels where there is one."""

    def __init__(self, config: EncoderConfig, groups: tuple[AttentionGroup, ...], ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        group_of = {layer: group for group in groups for layer in group.layers}
        width = config.hidden_size
        self.embedding = ctx.embedding("embed", config.vocab_size, width)
        self.positions = ctx.embedding("positions", config.positions, width) if config.positions else None
        self.types = ctx.embedding("types", config.token_types, width) if config.token_types else None
        self.embed_norm = _norm("embed_norm", config, ctx)
        block = BLOCKS[config.order]
        self.layers = nn.ModuleList(block(i, config.of_layer(i), group_of, ctx) for i in range(config.num_layers))
        self.norm = _norm("norm", config, ctx) if config.final_norm else None
        self.head = LabelHead(config, ctx) if config.labels else None
        self.vectors = ctx.linear("project", width, config.vector_size) if config.vector_size else None

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the tokens' own embeddings [T, E]."""
        rows_TE: torch.Tensor = self.embedding(ids_T)
        return rows_TE

    def forward(self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, E]."""
        hidden_TE = self.embed_norm(self._placed(hidden_TE, positions_T, ctx))
        residual_TE: torch.Tensor | None = None
        for layer in self.layers:
            hidden_TE, residual_TE = layer(hidden_TE, residual_TE, positions_T, ctx)
        if residual_TE is not None:
            hidden_TE = hidden_TE + residual_TE
        return hidden_TE if self.norm is None else self.norm(hidden_TE)

    def classify(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return scores [R, L]."""
        assert self.head is not None, "a model without labels is never asked for them"
        scores_RL: torch.Tensor = self.head(hidden_RE)
        return scores_RL

    def project(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Return the vectors [T, D] of tokens."""
        rows_TD: torch.Tensor = hidden_TE if self.vectors is None else self.vectors(hidden_TE)
        return rows_TD

    def _placed(self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Add where tokens are and which part of the prompt they belong to."""
        if self.positions is not None:
            hidden_TE = hidden_TE + self.positions(positions_T + self.config.position_offset)
        if self.types is not None:
            types_T = ctx.token_types
            hidden_TE = hidden_TE + self.types(torch.zeros_like(positions_T) if types_T is None else types_T)
        return hidden_TE


class LabelHead(nn.Module):
    """Two projections, with an activation and perhaps a norm between."""

    def __init__(self, config: EncoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        width = config.hidden_size
        self.dense = ctx.linear("dense", width, width, bias=config.dense_bias)
        self.activation = ctx.activation(config.dense_activation, gated=False)
        self.norm = _norm("dense_norm", config, ctx) if config.dense_norm else None
        self.labels = ctx.linear("labels", width, config.labels, bias=True)

    def forward(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return scores [R, L]."""
        x_RE = self.activation(self.dense(hidden_RE))
        if self.norm is not None:
            x_RE = self.norm(x_RE)
        scores_RL: torch.Tensor = self.labels(x_RE)
        return scores_RL


def _norm(name: str, config: EncoderConfig, ctx: BuildContext) -> Any:
    return ctx.norm(name, config.hidden_size, config.norm_eps, kind="layer", bias=config.norm_bias)
