"""What any backend for softmax attention over a paged cache must do: random steps over a poisoned cache, and a
reference that loops over tokens in float64.

Legend: T tokens, H query heads, K cache heads, D head size, V value size, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import AttentionEnv, AttentionRequest, AttentionStep, CacheSpec, StepLimits

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a layer: ``ratio`` query heads share a cache head; ``alibi``: it has linear biases."""

    kv_heads: int = 2
    ratio: int = 2
    head_size: int = 8
    value_size: int = 8
    block_size: int = 4
    window: int | None = None
    softcap: float = 0.0
    dtype: str = "float32"
    alibi: bool = False

    @property
    def slopes(self) -> list[float]:
        """Slopes of the biases of all heads: of different sizes, in no order."""
        return [0.01 * (7 * head % 11 + 1) for head in range(self.kv_heads * self.ratio)]

    def request(self) -> AttentionRequest:
        """Return what a backend is asked for."""
        return AttentionRequest(
            kind="sliding" if self.window else "full",
            needs=frozenset({"alibi"} if self.alibi else ()),
            dtype=self.dtype,
            layers=(0,),
            num_heads=self.kv_heads * self.ratio,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            value_head_size=self.value_size,
            scale=self.head_size**-0.5,
            window=self.window,
            softcap=self.softcap,
        )


@dataclass(frozen=True, slots=True)
class Query:
    """One sequence of a step: ``new`` tokens after ``old`` ones that are in the cache."""

    new: int
    old: int = 0


@dataclass(slots=True)
class Case:
    """A step, its inputs, and everything that was ever said to the cache.

    Args:
        keys, values: per sequence [L, K, D] and [L, K, V], old and new. cache: planes; only old tokens are written,
            everything else is NaN.
    """

    shape: Shape
    env: AttentionEnv
    step: AttentionStep
    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache: dict[str, torch.Tensor]


def make_step(queries: Sequence[Query], block_size: int, pages: npt.NDArray[np.int32], width: int = 0) -> AttentionStep:
    """Return a step; ``pages`` are given out in order. Sequences with one new token go first, as the engine does."""
    counts = np.array([q.new for q in queries], dtype=np.int32)
    lengths = counts + np.array([q.old for q in queries], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    blocks = -(-lengths // block_size)
    table = np.zeros((len(queries), max(int(blocks.max()), width)), dtype=np.int32)
    at = 0
    for row, count in enumerate(blocks):
        table[row, :count] = pages[at : at + count]
        at += count
    positions = np.concatenate([np.arange(q.old, q.old + q.new) for q in queries])
    rows = np.repeat(np.arange(len(queries)), counts)
    slots = table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return AttentionStep(
        num_tokens=int(starts[-1]),
        num_sequences=len(queries),
        num_decodes=int((counts == 1).sum()),
        max_query=int(counts.max()),
        max_length=int(lengths.max()),
        query_start=torch.from_numpy(starts),
        lengths=torch.from_numpy(lengths),
        block_table=torch.from_numpy(table),
        slots=torch.from_numpy(slots),
        positions=torch.from_numpy(positions.astype(np.int64)),
        query_start_host=starts,
        lengths_host=lengths,
    )


def make_case(backend: Any, shape: Shape, queries: Sequence[Query], seed: int = 0) -> Case:
    """Return a random case; ``backend`` is the class, which says how its cache is laid out."""
    generator = np.random.default_rng(seed)
    ordered = sorted(queries, key=lambda q: q.new != 1)
    request = shape.request()
    spec: CacheSpec = backend.cache_specs(request)[0]
    needed = sum(-(-(q.new + q.old) // shape.block_size) for q in ordered)
    pages = generator.permutation(np.arange(1, needed + 4, dtype=np.int32))
    step = make_step(ordered, shape.block_size, pages, width=2)
    dtype = getattr(torch, shape.dtype)

    def numbers(*size: int) -> torch.Tensor:
        return torch.from_numpy(generator.normal(size=size)).to(dtype)

    keys = [numbers(q.new + q.old, shape.kv_heads, shape.head_size) for q in ordered]
    values = [numbers(q.new + q.old, shape.kv_heads, shape.value_size) for q in ordered]
    cache = {
        plane.name: torch.full((needed + 4, *plane.page_shape(shape.block_size)), float("nan"), dtype=dtype)
        for plane in spec.planes
    }
    case = Case(
        shape,
        AttentionEnv(
            request, spec, shape.block_size, CPU, alibi_slopes=torch.tensor(shape.slopes) if shape.alibi else None
        ),
        step,
        numbers(step.num_tokens, shape.kv_heads * shape.ratio, shape.head_size),
        torch.cat([k[q.old :] for k, q in zip(keys, ordered, strict=True)]),
        torch.cat([v[q.old :] for v, q in zip(values, ordered, strict=True)]),
        keys,
        values,
        cache,
    )
    _write_old(backend, case, ordered)
    return case


def _write_old(backend: Any, case: Case, queries: Sequence[Query]) -> None:
    """Put what came before the step into the cache, token by token, with the backend's own ``write``."""
    layer, size = backend.layer(case.env, 0), case.shape.block_size
    for row, query in enumerate(queries):
        window = case.shape.window
        first = max(0, query.old - window + 1) if window else 0
        # Blocks behind a window may have been freed: their entries point to page 0.
        freed = first // size
        places = np.arange(freed * size, query.old)
        pages = case.step.block_table[row].numpy()[places // size].astype(np.int64)
        slots = torch.from_numpy(pages * size + places % size)
        if len(places):
            layer.write(case.keys[row][places], case.values[row][places], case.cache, slots)
        case.step.block_table[row, :freed] = 0


def run(backend: Any, case: Case) -> torch.Tensor:
    """Write the new tokens and attend; returns [T, H, V]."""
    step = case.step
    builder = backend.metadata_builder(case.env)
    builder.allocate(StepLimits(step.num_tokens, step.num_sequences, step.block_table.shape[1], step.max_length))
    layer = backend.layer(case.env, 0)
    layer.write(case.k_TKD, case.v_TKV, case.cache, step.slots)
    out = torch.full((*case.q_THD.shape[:2], case.shape.value_size), float("nan"), dtype=case.q_THD.dtype)
    layer.attend(case.q_THD, case.cache, builder.build(step), out)
    return out


def reference(case: Case) -> torch.Tensor:
    """Return [T, H, V] in float64: one token and one head at a time, from what was said and not from the cache."""
    shape, rows = case.shape, []
    starts = case.step.query_start_host.tolist()
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        for token in range(starts[row], starts[row + 1]):
            seen = len(keys) - starts[row + 1] + token + 1
            first = max(0, seen - shape.window) if shape.window else 0
            rows.append(_one_token(case.q_THD[token], keys[first:seen], values[first:seen], shape))
    return torch.stack(rows)


def _one_token(q_HD: torch.Tensor, k_LKD: torch.Tensor, v_LKV: torch.Tensor, shape: Shape) -> torch.Tensor:
    heads = []
    for head, query in enumerate(q_HD.double()):
        scores = k_LKD[:, head // shape.ratio].double() @ query * shape.head_size**-0.5
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if shape.alibi:
            scores = scores + shape.slopes[head] * torch.arange(len(scores), dtype=torch.float64)
        heads.append(scores.softmax(0) @ v_LKV[:, head // shape.ratio].double())
    return torch.stack(heads)


def copy_cache(cache: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of all planes."""
    return {name: plane.clone() for name, plane in cache.items()}


def with_cache(case: Case, cache: dict[str, torch.Tensor]) -> Case:
    """Return the same case over another cache."""
    return replace(case, cache=cache)
