"""Random paged batches and attention by brute force. Legend: B sequences, T tokens, H query heads, K cache heads, D
head size, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from jackfield.interfaces import (
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    AttentionStep,
    DeviceFacts,
    StepLimits,
)
from jackfield.interfaces.attention import PROMPT_TOKENS
from jackfield.interfaces.plugin import Settings


@dataclass
class Shape:
    """What is to be tried. ``counts`` are new tokens and ``lengths`` all tokens of each sequence, decodes first.
    scaled: the cache holds numbers divided by a scale for each head.
    """

    counts: Sequence[int]
    lengths: Sequence[int]
    heads: int = 4
    kv_heads: int = 2
    size: int = 32
    block: int = 16
    window: int | None = None
    chunked: bool = False
    softcap: float = 0.0
    sinks: bool = False
    dtype: str = "float32"
    stored: str = ""
    scaled: bool = False
    device: str = "cpu"
    layout: int = 0
    cores: int = 4
    settings: dict[str, int] = field(default_factory=dict)


@dataclass
class Case:
    """A shape made real. Page 0 and all places that no sequence owns hold NaN."""

    shape: Shape
    env: AttentionEnv
    step: AttentionStep
    cache: dict[str, torch.Tensor]
    qkv: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @property
    def q(self) -> torch.Tensor:
        """Queries [T, H, D], a strided view."""
        shape = self.shape
        return self.qkv[:, : shape.heads * shape.size].view(-1, shape.heads, shape.size)


def request_of(shape: Shape) -> AttentionRequest:
    """Return the request of a shape."""
    capability = torch.cuda.get_device_capability() if shape.device == "cuda" else (9, 0)
    facts = DeviceFacts("cuda", capability=capability, cores=shape.cores)
    return AttentionRequest(
        kind="chunked_local" if shape.chunked else "sliding" if shape.window else "full",
        dtype=shape.dtype,
        device=facts,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_size=shape.size,
        scale=shape.size**-0.5,
        window=shape.window,
        softcap=shape.softcap,
        cache_dtype=shape.stored,
        needs=frozenset({"cache_scales"} if shape.scaled else ()),
    )


def make_case(backend: type[AttentionBackend], shape: Shape, seed: int = 0) -> Case:
    """Return a batch whose sequences lie on shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    dtype, device = getattr(torch, shape.dtype), torch.device(shape.device)
    request = request_of(shape)
    spec = backend.cache_specs(request)[shape.layout]
    sinks = torch.randn(shape.heads, generator=generator).to(device) if shape.sinks else None
    scales = [torch.rand(shape.kv_heads, generator=generator) * 0.1 + 0.01 if shape.scaled else None for _ in range(2)]
    bound = [None if scale is None else scale.to(device) for scale in scales]
    env = AttentionEnv(request, spec, shape.block, device, Settings(shape.settings), sinks, None, *bound)
    kv = [
        [torch.randn(length, shape.kv_heads, shape.size, generator=generator).to(dtype) for length in shape.lengths]
        for _ in range(2)
    ]
    kept = kv
    if shape.stored:  # what is stored is what counts
        factors = [1.0 if scale is None else scale[:, None] for scale in scales]
        kept = [
            [(part / factor).to(getattr(torch, shape.stored)) for part in parts]
            for parts, factor in zip(kv, factors, strict=True)
        ]
        kv = [
            [part.to(torch.promote_types(dtype, torch.float32)).mul(factor).to(dtype) for part in parts]
            for parts, factor in zip(kept, factors, strict=True)
        ]
    blocks = [-(-length // shape.block) for length in shape.lengths]
    pages = torch.randperm(sum(blocks), generator=generator) + 1
    table = torch.zeros((len(blocks), max(*blocks, 1)), dtype=torch.int32)
    for row, part in zip(table, torch.split(pages, blocks), strict=True):
        row[: len(part)] = part
    stored = getattr(torch, shape.stored or shape.dtype)
    cache = {plane.name: _plane(plane.page_shape(shape.block), len(pages) + 1, stored) for plane in spec.planes}
    for planes, parts in zip(cache.values(), kept, strict=True):
        head_first = planes.shape[1] == shape.kv_heads and spec.planes[0].shape[0] == shape.kv_heads
        for row, part in zip(table, parts, strict=True):
            for position, token in enumerate(part):
                page, place = row[position // shape.block], position % shape.block
                planes[(page, slice(None), place) if head_first else (page, place)] = token.to(stored)
    width = (shape.heads + 2 * shape.kv_heads) * shape.size
    qkv = torch.randn(sum(shape.counts), width, generator=generator).to(dtype).to(device)
    return Case(
        shape, env, make_step(shape, table, device), {n: p.to(device) for n, p in cache.items()}, qkv, kv[0], kv[1]
    )


def _plane(page_shape: tuple[int, ...], pages: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((pages, *page_shape), float("nan"), dtype=dtype)


def make_step(shape: Shape, table: torch.Tensor, device: torch.device) -> AttentionStep:
    """Return the step of a shape; lengths on the host are bounds, exact of prompts alone."""
    counts, lengths = np.asarray(shape.counts, dtype=np.int32), np.asarray(shape.lengths, dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = torch.cat(
        [torch.arange(int(n - c), int(n)) for c, n in zip(counts, lengths, strict=True)] or [torch.zeros(0)]
    ).long()
    owners = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    slots = table[owners, positions // shape.block].long() * shape.block + positions % shape.block
    return AttentionStep(
        num_tokens=int(counts.sum()),
        num_sequences=len(counts),
        num_decodes=int((counts == 1).sum()),
        max_query=int(counts.max()),
        max_length=int(lengths.max()) + 5,
        query_start=torch.from_numpy(starts).to(device),
        lengths=torch.from_numpy(lengths).to(device),
        block_table=table.to(device),
        slots=slots.to(device),
        positions=positions.to(device),
        query_start_host=starts,
        lengths_host=lengths + 5 * (counts < PROMPT_TOKENS),
    )


def limits_of(case: Case) -> StepLimits:
    """Return limits that the case fits into."""
    step = case.step
    return StepLimits(step.num_tokens, step.num_sequences + 2, step.block_table.shape[1], step.max_length)


def attended(backend: type[AttentionBackend], case: Case) -> torch.Tensor:
    """Return what the backend computes; the output is poisoned before."""
    builder = backend.metadata_builder(case.env)
    builder.allocate(limits_of(case))
    return attend(backend.layer(case.env, 0), case, builder.build(case.step))


def attend(layer: Any, case: Case, metadata: Any) -> torch.Tensor:
    """Run a layer into a poisoned output."""
    out = torch.full(case.q.shape, float("nan"), dtype=case.qkv.dtype, device=case.qkv.device)
    layer.attend(case.q, case.cache, metadata, out)
    return out


def expected(case: Case) -> torch.Tensor:
    """Return attention by brute force in float64, [T, H, D] on the CPU."""
    parts = []
    starts = case.step.query_start_host
    q = case.q.cpu().double()
    for b, length in enumerate(case.shape.lengths):
        parts.append(_sequence(case, q[starts[b] : starts[b + 1]], case.k[b].double(), case.v[b].double(), length))
    return torch.cat(parts)


def _sequence(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int) -> torch.Tensor:
    shape = case.shape
    group = shape.heads // shape.kv_heads
    scores = torch.einsum("qhd,lhd->hql", q, k.repeat_interleave(group, 1)) * case.env.request.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    mine, seen = torch.arange(length - len(q), length)[:, None], torch.arange(length)[None]
    hidden = seen > mine
    if shape.window:
        hidden |= seen < mine // shape.window * shape.window if shape.chunked else seen <= mine - shape.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if case.env.sinks is not None:
        sink = case.env.sinks.cpu().double()[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hql,lhd->qhd", weights, v.repeat_interleave(group, 1))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error in the Euclidean norm; NaN stays NaN."""
    return float((found.cpu().double() - wanted.cpu().double()).norm() / wanted.cpu().double().norm().clamp_min(1e-30))


TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.5e-2}
"""Bounds of :func:`error` by storage type."""
