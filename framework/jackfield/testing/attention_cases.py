"""Random steps of softmax attention over a poisoned paged cache, and a reference that loops over tokens in float64.

Legend: T tokens, H query heads, K cache heads, D head size, V value size, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import (
    AttentionEnv,
    AttentionRequest,
    AttentionStep,
    CacheSpec,
    Plane,
    RankInfo,
    Reason,
    Settings,
    StepLimits,
    TreeMask,
)
from jackfield.testing.attention_shapes import Shape

CPU = torch.device("cpu")
SPARE = 4
"""Pages that belong to nobody."""


@dataclass(frozen=True, slots=True)
class Query:
    """One sequence of a step: ``new`` tokens after ``old`` ones that are in the cache. The last of them are drafts that
    branch, where there are ``parents``: of each the index of its parent among them, -1 for the token before them.
    """

    new: int
    old: int = 0
    parents: tuple[int, ...] = ()

    def path(self, token: int) -> list[int]:
        """Return where all are stored that a new token comes behind, and itself, in the order of the text."""
        place, first = self.old + token, self.old + self.new - len(self.parents)
        drafts: list[int] = []
        while place >= first:
            drafts.append(place)
            parent = self.parents[place - first]
            place = first + parent if parent >= 0 else first - 1
        return [*range(place + 1), *reversed(drafts)]


STEPS: Mapping[str, Sequence[Query]] = {
    "decode": [Query(1, 0), Query(1, 5), Query(1, 16), Query(1, 63)],
    "verification": [Query(3, 10), Query(8, 31), Query(2, 0)],
    "prefill": [Query(9), Query(33), Query(64)],
    "chunks": [Query(20, 12), Query(9, 1), Query(40, 40)],
    "mixed": [Query(1, 30), Query(1, 2), Query(4, 9), Query(8, 8), Query(30), Query(17, 23)],
}
"""One of each kind of step."""


@dataclass(slots=True)
class Case:
    """A step, its inputs, and everything that was ever said to the cache.

    Args:
        keys, values: per sequence [L, K, D] and [L, K, V], old and new. cache: planes; only old tokens are written,
            everything else is NaN. queries: the sequences.
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
    queries: Sequence[Query]


def make_step(
    queries: Sequence[Query],
    block_size: int,
    pages: npt.NDArray[np.int32],
    width: int = 0,
    device: torch.device = CPU,
) -> AttentionStep:
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
    places = np.concatenate([np.arange(q.old, q.old + q.new) for q in queries])
    rows = np.repeat(np.arange(len(queries)), counts)
    slots = table[rows, places // block_size].astype(np.int64) * block_size + places % block_size
    tree = make_tree(queries, device) if any(q.parents for q in queries) else None
    positions = places if tree is None else tree.positions_host
    return AttentionStep(
        num_tokens=int(starts[-1]),
        num_sequences=len(queries),
        num_decodes=int((counts == 1).sum()),
        max_query=int(counts.max()),
        max_length=int(lengths.max()),
        query_start=torch.from_numpy(starts).to(device),
        lengths=torch.from_numpy(lengths).to(device),
        block_table=torch.from_numpy(table).to(device),
        slots=torch.from_numpy(slots).to(device),
        positions=torch.from_numpy(positions.astype(np.int64)).to(device),
        query_start_host=starts,
        lengths_host=lengths,
        tree=tree,
    )


def make_tree(queries: Sequence[Query], device: torch.device = CPU) -> TreeMask:
    """Return what the tokens of a step see where drafts branch."""
    base, bits, positions = [], [], []
    for query in queries:
        for token in range(query.new):
            path, first = query.path(token), query.old + query.new - len(query.parents)
            known = min(first, query.old + token + 1)
            base.append(known)
            bits.append(sum(1 << (place - known) for place in path if place >= known))
            positions.append(len(path) - 1)
    hosted = np.array(base, dtype=np.int32), np.array(bits, dtype=np.int64)
    sent = [torch.from_numpy(part).to(device) for part in hosted]
    return TreeMask(sent[0], sent[1], *hosted, np.array(positions, dtype=np.int64))


def spec_for(backend: Any, request: AttentionRequest, block_size: int) -> CacheSpec | None:
    """Return the backend's best layout that takes blocks of that size, or None."""
    specs: Iterable[CacheSpec] = backend.cache_specs(request)
    return next((spec for spec in specs if spec.per != "block" or spec.block_sizes.allows(block_size)), None)


def layout_reasons(block_size: int) -> Any:
    """Return a check, as the oracle makes it, that the backend has a layout for blocks of that size."""

    def check(backend: Any, request: Any) -> list[Reason]:
        if spec_for(backend, request, block_size) is not None:
            return []
        return [Reason("block_size", "block_size", f"no layout for blocks of {block_size} tokens")]

    return check


def empty_plane(
    plane: Plane, pages: int, block_size: int, device: torch.device, fill: float | None = None
) -> torch.Tensor:
    """Return a plane [pages, ...] in its memory order, full of NaN (of large numbers where the type has none)."""
    dtype: torch.dtype = getattr(torch, plane.dtype)
    shape = (pages, *plane.page_shape(block_size))
    order = plane.order or tuple(range(len(shape)))
    poison = fill if fill is not None else float("nan") if dtype.is_floating_point else 101
    stored = torch.full(tuple(shape[i] for i in order), poison, device=device).to(dtype)
    return stored.permute([order.index(i) for i in range(len(order))])


def settings_of(backend: Any) -> Settings:
    """Return a backend's options as declared."""
    return Settings({name: option.default for name, option in getattr(backend, "options", {}).items()})


def make_case(
    backend: Any,
    shape: Shape,
    queries: Sequence[Query],
    seed: int = 0,
    *,
    device: torch.device = CPU,
) -> Case:
    """Return a random case; ``backend`` is the class, which says how its cache is laid out."""
    generator = np.random.default_rng(seed)
    ordered = sorted(queries, key=lambda q: q.new != 1)
    request = shape.request()
    spec = spec_for(backend, request, shape.block_size)
    assert spec is not None, f"no layout for blocks of {shape.block_size}"
    needed = sum(-(-(q.new + q.old) // shape.block_size) for q in ordered)
    pages = generator.permutation(np.arange(1, needed + SPARE, dtype=np.int32))
    step = make_step(ordered, shape.block_size, pages, width=2, device=device)
    dtype = getattr(torch, shape.dtype)

    def numbers(*size: int) -> torch.Tensor:
        return torch.from_numpy(generator.normal(size=size)).to(device, dtype)

    keys = [numbers(q.new + q.old, shape.kv_heads, shape.head_size) for q in ordered]
    values = [numbers(q.new + q.old, shape.kv_heads, shape.value_size) for q in ordered]
    case = Case(
        shape,
        environment(backend, shape, request, spec, device),
        step,
        numbers(step.num_tokens, shape.query_heads, shape.head_size),
        torch.cat([k[q.old :] for k, q in zip(keys, ordered, strict=True)]),
        torch.cat([v[q.old :] for v, q in zip(values, ordered, strict=True)]),
        keys,
        values,
        {plane.name: empty_plane(plane, needed + SPARE, shape.block_size, device) for plane in spec.planes},
        ordered,
    )
    _write_old(backend, case, ordered)
    return case


def environment(
    backend: Any, shape: Shape, request: AttentionRequest, spec: CacheSpec, device: torch.device
) -> AttentionEnv:
    """Return what a backend is built with; slopes and sinks are those of the request's rank."""
    rank = request.rank
    mine = slice(rank.rank * request.local_heads, (rank.rank + 1) * request.local_heads)
    slopes = torch.tensor(shape.slopes[mine], device=device) if shape.alibi else None
    sinks = torch.tensor(shape.sink_logits[mine], device=device) if shape.sinks else None
    return AttentionEnv(request, spec, shape.block_size, device, settings_of(backend), sinks, slopes)


def _write_old(backend: Any, case: Case, queries: Sequence[Query]) -> None:
    """Put what came before the step into the cache, token by token, with the backend's own ``write``."""
    layer, size = backend.layer(case.env, 0), case.shape.block_size
    for row, query in enumerate(queries):
        # Blocks that no token of the step sees may have been freed: their entries point to page 0.
        freed = min(case.shape.first_seen(query.old), query.old) // size
        places = np.arange(freed * size, query.old)
        pages = case.step.block_table[row].cpu().numpy()[places // size].astype(np.int64)
        slots = torch.from_numpy(pages * size + places % size).to(case.step.slots.device)
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
    rotations = 3 if case.shape.dual_chunk else 1
    shape = (len(case.q_THD), case.q_THD.shape[1] // rotations, case.shape.value_size)
    out = torch.full(shape, float("nan"), dtype=case.q_THD.dtype, device=case.q_THD.device)
    layer.attend(case.q_THD, case.cache, builder.build(step), out)
    return out


def run_rank(backend: Any, case: Case, rank: RankInfo) -> torch.Tensor:
    """Compute one rank's heads of a case whose sequences are all new; returns [T, H / ranks, V]."""
    request = case.shape.request(rank)
    spec = spec_for(backend, request, case.shape.block_size)
    assert spec is not None, "a rank has no layout where one rank alone has"
    pages, device = len(next(iter(case.cache.values()))), case.q_THD.device
    heads = slice(rank.rank * request.local_heads, (rank.rank + 1) * request.local_heads)
    first = rank.rank * case.shape.kv_heads // rank.size
    kept = slice(first, first + request.local_kv_heads)
    part = replace(
        case,
        env=environment(backend, case.shape, request, spec, device),
        q_THD=case.q_THD[:, heads].contiguous(),
        k_TKD=case.k_TKD[:, kept].contiguous(),
        v_TKV=case.v_TKV[:, kept].contiguous(),
        cache={plane.name: empty_plane(plane, pages, case.shape.block_size, device) for plane in spec.planes},
    )
    return run(backend, part)


def reference(case: Case) -> torch.Tensor:
    """Return [T, H, V] in float64: one token and one head at a time, from what was said and not from the cache."""
    shape, rows = case.shape, []
    starts = case.step.query_start_host.tolist()
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        for token in range(starts[row], starts[row + 1]):
            path = case.queries[row].path(token - starts[row])
            seen = path[shape.first_seen(len(path) - 1) :]
            rows.append(_one_token(case.q_THD[token], keys[seen], values[seen], shape))
    return torch.stack(rows)


def _one_token(q_HD: torch.Tensor, k_LKD: torch.Tensor, v_LKV: torch.Tensor, shape: Shape) -> torch.Tensor:
    heads, last = [], len(k_LKD) - 1
    for head in range(shape.heads):
        scores = k_LKD[:, head // shape.ratio].double() @ q_HD[head].double()
        if shape.dual_chunk:
            # Keys of the chunk before and of all earlier ones meet queries of their own.
            chunks_L = torch.arange(len(k_LKD), device=q_HD.device) // shape.dual_chunk
            turns_L = (last // shape.dual_chunk - chunks_L).clamp(max=2)
            own_LD = q_HD[turns_L * shape.heads + head].double()
            scores = (k_LKD[:, head // shape.ratio].double() * own_LD).sum(1)
        scores = scores * shape.head_size**-0.5
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if shape.alibi:
            scores = scores + shape.slopes[head] * torch.arange(len(scores), dtype=torch.float64, device=scores.device)
        if shape.sinks:
            scores = torch.cat((scores, scores.new_tensor([shape.sink_logits[head]])))
        heads.append(scores.softmax(0)[: len(k_LKD)] @ v_LKV[:, head // shape.ratio].double())
    return torch.stack(heads)


def copy_cache(cache: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of all planes."""
    return {name: plane.clone() for name, plane in cache.items()}


def with_cache(case: Case, cache: dict[str, torch.Tensor]) -> Case:
    """Return the same case over another cache."""
    return replace(case, cache=cache)


def bits(plane: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a plane's bytes, an element's in the last dimension: NaN equals itself there."""
    stored = plane.contiguous().cpu()
    return stored.view(torch.uint8).numpy().reshape(*stored.shape, stored.element_size())


def written(backend: Any, case: Case, slots: torch.Tensor) -> dict[str, npt.NDArray[np.bool_]]:
    """Return which elements of each plane a write of the step's new tokens changes, [pages, ...]. Two backgrounds tell
    an element that was not written from one that happened to be the same.
    """
    changed: dict[str, npt.NDArray[np.bool_]] = {}
    for fill in (3.0, 5.0):
        cache = {
            plane.name: empty_plane(plane, len(case.cache[plane.name]), case.env.block_size, slots.device, fill)
            for plane in case.env.spec.planes
        }
        before = {name: bits(plane) for name, plane in copy_cache(cache).items()}
        backend.layer(case.env, 0).write(case.k_TKD, case.v_TKV, cache, slots)
        for name, plane in cache.items():
            found = (bits(plane) != before[name]).any(-1)
            changed[name] = changed[name] | found if name in changed else found
    return changed
