"""A model of transformers with this engine's layers in it. Legend: T tokens, E width, R rows, V vocabulary, H heads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from jackfield.errors import ConfigError
from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield.layers.parameters import LoadableModule
from jackfield_models.transformers_build import RUN, Parts, embedding_scale, fill_buffers, make_model
from jackfield_models.transformers_fallback import Mixer, TransformersConfig
from jackfield_models.transformers_trace import Trunk
from jackfield_models.transformers_weights import Held, conversions, float32_names

CUT = {"colwise": Parallel.COLUMN, "rowwise": Parallel.ROW}
"""Styles of transformers' plans for tensor parallelism that this engine's linear layers have."""


class FallbackModel(nn.Module):
    """Implements TextModel around transformers' decoder and what its causal model does behind it."""

    def __init__(self, config: TransformersConfig, groups: tuple[AttentionGroup, ...], ctx: BuildContext) -> None:
        super().__init__()
        parts = make_model(config.architecture, config.keys, ctx.dtype, RUN)
        tensors = dict(parts.model.state_dict())
        scale = embedding_scale(parts)
        self.embed_scale = float(torch.tensor(scale, dtype=ctx.dtype))
        fill_buffers(parts, ctx.device)
        self._step = Step()
        self._attach_attention(parts, config, groups, ctx)
        sinks: dict[str, LoadableModule] = dict(_linears(parts, config, ctx))
        rows, width = config.vocab_size, config.hidden_size
        self.embedding = ctx.embedding(parts.embedding_path, rows, width)
        self.head = ctx.head(
            parts.head_path,
            parts.head.out_features,
            parts.head.in_features,
            bias=parts.head.bias is not None,
            tied=self.embedding if config.tie_embeddings else None,
        )
        sinks |= {parts.embedding_path: self.embedding, parts.head_path: self.head}
        held = {made.path: made for made in _held(parts, tensors, sinks, ctx)}
        self.held = nn.ModuleList(held.values())
        self.conversions = nn.ModuleList(conversions(parts, tensors, {**sinks, **held}))
        _put_in(parts, sinks)
        self.trunk, self.outer = parts.trunk, _only_head(parts)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return input embeddings [T, E]."""
        rows_TE: torch.Tensor = self.embedding(ids_T)
        return rows_TE if self.embed_scale == 1.0 else rows_TE * self.embed_scale

    def forward(self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, E]."""
        self._step.ctx, self._step.positions_T = ctx, positions_T
        try:
            found = self.trunk(
                inputs_embeds=hidden_TE.unsqueeze(0),
                position_ids=positions_T.long().unsqueeze(0),
                attention_mask=None,
                use_cache=False,
            )
        finally:
            self._step.ctx = self._step.positions_T = None
        final_TE: torch.Tensor = found[0].squeeze(0)
        return final_TE

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V]: the head, and whatever transformers' model does with its results."""
        rows_RV: torch.Tensor = self.outer(inputs_embeds=hidden_RE.unsqueeze(0), use_cache=False).logits.squeeze(0)
        return rows_RV

    def _attach_attention(
        self, parts: Parts, config: TransformersConfig, groups: tuple[AttentionGroup, ...], ctx: BuildContext
    ) -> None:
        group_of = {layer: group for group in groups for layer in group.layers}
        self.attention = nn.ModuleList(ctx.attention(i, group_of[i]) for i in range(config.num_layers))
        for mixer, attention in zip(config.mixers, self.attention, strict=True):
            parts.model.get_submodule(mixer.path).engine_bound = Bound(attention, self._step)


class Step:
    """What attention needs to know of the step that runs."""

    __slots__ = ("ctx", "positions_T")

    def __init__(self) -> None:
        self.ctx: ForwardContext | None = None
        self.positions_T: torch.Tensor | None = None


class Bound:
    """The attention of one module of transformers."""

    def __init__(self, attention: Any, step: Step) -> None:
        self._attention, self._step = attention, step

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, said: Mapping[str, Any]
    ) -> torch.Tensor:
        """Attend: q [1, H, T, D], k [1, K, T, D], v [1, K, T, V] → [1, T, H, V]. All else was agreed on before."""
        tokens = q.shape[2]
        assert q.shape[1] == self._attention.heads, "heads are cut as the plan says"
        qkv = torch.cat([x.squeeze(0).transpose(0, 1).reshape(tokens, -1) for x in (q, k, v)], dim=-1)
        out = self._attention(qkv, self._step.positions_T, self._step.ctx)
        return out.view(1, tokens, q.shape[1], v.shape[-1])  # type: ignore[no-any-return]


class Bridged(nn.Module):
    """One of this engine's linear layers where transformers had one: takes any leading dimensions."""

    def __init__(self, inner: Any, old: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.in_features, self.out_features = old.in_features, old.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., O] of [..., I]."""
        y: torch.Tensor = self.inner(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])


def _linears(parts: Parts, config: TransformersConfig, ctx: BuildContext) -> Iterator[tuple[str, Any]]:
    """Make the decoder's linear layers."""
    linears = parts.linears(config.kept)
    styles = _styles(parts, config.kept)
    mixers = {mixer.path: mixer for mixer in config.mixers}
    for mixer in config.mixers:
        _check_cut(mixer, styles, ctx)
    for path, linear in linears.items():
        owner = mixers.get(path.rpartition(".")[0])
        parallel = styles.get(path, Parallel.REPLICATED)
        yield (
            path,
            ctx.linear(
                path,
                linear.in_features,
                [_shard(linear, parallel, owner)],
                bias=linear.bias is not None,
                parallel=parallel,
                input_unit=owner.value_head_size if owner is not None and parallel is Parallel.ROW else 1,
            ),
        )


def _styles(parts: Parts, kept: frozenset[str]) -> dict[str, Parallel]:
    """Return how linear layers are cut. Those of one module are cut together, or not at all: where its plan has a style
    that this engine lacks, or one of them stays transformers', all are replicated.
    """
    plan = parts.model.tp_plan or {}
    said: dict[str, dict[str, str]] = {}
    for path in parts.linears():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is not None:
            said.setdefault(path.rpartition(".")[0], {})[path] = style if path not in kept else "kept"
    return {
        path: CUT[style] for below in said.values() if set(below.values()) == set(CUT) for path, style in below.items()
    }


def _check_cut(mixer: Mixer, styles: Mapping[str, Parallel], ctx: BuildContext) -> None:
    """Refuse several ranks where transformers' plan does not cut attention by heads."""
    if ctx.local_heads(mixer.num_heads) == mixer.num_heads:
        return
    if not any(path.rpartition(".")[0] == mixer.path for path in styles):
        raise ConfigError(
            f"transformers has no plan that cuts {mixer.path} by heads",
            field="parallel.tensor_parallel_size",
            value=mixer.num_heads // ctx.local_heads(mixer.num_heads),
            remedy="leave it at 1, or install a plugin for the architecture",
        )


def _shard(linear: nn.Linear, parallel: Parallel, mixer: Mixer | None) -> OutputShard:
    """Return the outputs of a layer: cache heads may lie on several ranks."""
    size = linear.out_features
    if mixer is not None and parallel is Parallel.COLUMN and mixer.num_kv_heads < mixer.num_heads:
        for head in (mixer.head_size, mixer.value_head_size):
            if size == mixer.num_kv_heads * head:
                return OutputShard("", size, head, may_replicate=True)
    return OutputShard("", size)


def _held(parts: Parts, tensors: Mapping[str, Any], replaced: Mapping[str, Any], ctx: BuildContext) -> Iterator[Held]:
    """Make the tensors of the modules that stay."""
    fp32 = float32_names(parts.model, ctx.dtype)
    names: dict[str, list[str]] = {}
    for tensor in tensors:
        module, _, name = tensor.rpartition(".")
        if parts.covers(tensor) and module not in replaced:
            names.setdefault(module, []).append(name)
    for path, below in names.items():
        yield Held(path, parts.model.get_submodule(path), below, fp32, ctx.device)


def _put_in(parts: Parts, replaced: Mapping[str, Any]) -> None:
    for path, module in replaced.items():
        parent, _, name = path.rpartition(".")
        owner = parts.model.get_submodule(parent)
        old = owner._modules[name]
        owner._modules[name] = Bridged(module, old) if isinstance(old, nn.Linear) else module


def _only_head(parts: Parts) -> Any:
    """Return the causal model with nothing in it but its head."""
    model = parts.model
    for name in [name for name, _ in model.named_children() if name != parts.head_path]:
        del model._modules[name]
    model._modules[model.base_model_prefix] = Trunk()
    return model
