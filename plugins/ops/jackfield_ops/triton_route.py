# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Routing in one kernel: a program scores the experts of a token and takes the best, one after another.

Legend: T tokens, X experts (and zero experts), S chosen, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jackfield.interfaces import MoEConfig
from jackfield_triton.launch import launch_options, power_of_two

WIDE = 256
"""More experts than this take four warps."""


@triton.jit
def _scores(x, SCORING: tl.constexpr):
    """Return what float32 logits become before the choice."""
    if SCORING == "softmax":
        likely = tl.exp(x - tl.max(x, 0))
        return likely / tl.sum(likely, 0)
    elif SCORING == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-x))
    elif SCORING == "sqrtsoftplus":
        # log(1 + e), whose rounding is made up for (Kahan): small scores must stay apart. Above 20 it is x itself.
        e = tl.exp(tl.minimum(x, 20.0))
        u = 1.0 + e
        soft = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
        return tl.sqrt(tl.where(x > 20.0, x, soft))
    else:
        return x


@triton.jit
def _first_best(values, at, LAST: tl.constexpr):
    """Return the lowest index of the largest value."""
    return tl.minimum(tl.min(tl.where(values == tl.max(values, 0), at, LAST), 0), LAST)


@triton.jit
def _of_best_groups(
    choice, at, size, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BEST: tl.constexpr, TOP2: tl.constexpr
):  # fmt: skip
    """Return the scores with minus infinity outside the BEST groups of ``size`` experts."""
    which = tl.arange(0, WIDTH)
    marks = tl.full((WIDTH,), float("-inf"), tl.float32)
    group = at // size
    for one in tl.static_range(GROUPS):
        mine = tl.where(group == one, choice, float("-inf"))
        mark = tl.max(mine, 0)
        if TOP2:
            first = tl.min(tl.where((mine == mark) & (group == one), at, 2147483647), 0)
            mark += tl.max(tl.where(at == first, float("-inf"), mine), 0)
        marks = tl.where(which == one, mark, marks)
    allowed = at < 0
    for _ in tl.static_range(BEST):
        best = _first_best(marks, which, GROUPS - 1)
        allowed = allowed | (group == best)
        marks = tl.where(which == best, float("-inf"), marks)
    return tl.where(allowed, choice, float("-inf"))


@triton.jit
def route_kernel(
    logits, bias, weights, experts, count, stride, size, scale, floor, WIDTH: tl.constexpr, CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr, SCORING: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, GROUP_WIDTH: tl.constexpr,
    BEST: tl.constexpr, TOP2: tl.constexpr, RENORMALIZE: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose for one token; grid: (T,). ``size``: experts of a group. LAST: the last expert."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < count
    added = tl.zeros((WIDTH,), tl.float32)
    if BIAS:
        added = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(logits + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    scores = _scores(x, SCORING)
    choice = tl.where(inside, scores + added, float("-inf"))
    if GROUPS > 1:
        choice = _of_best_groups(choice, at, size, GROUPS, GROUP_WIDTH, BEST, TOP2)
    slot = tl.arange(0, SLOTS)
    found = tl.zeros((SLOTS,), tl.float32)
    names = tl.zeros((SLOTS,), tl.int32)
    for index in tl.static_range(CHOSEN):
        expert = _first_best(choice, at, LAST)
        found = tl.where(slot == index, tl.sum(tl.where(at == expert, scores, 0.0), 0), found)
        names = tl.where(slot == index, expert, names)
        choice = tl.where(at == expert, float("-inf"), choice)
    there = slot < CHOSEN
    if SCORING == "softmax_chosen":
        found = tl.where(there, tl.exp(found - tl.max(tl.where(there, found, float("-inf")), 0)), 0.0)
        found = found / tl.sum(found, 0)
    if SCORING == "sigmoid_chosen":
        found = 1.0 / (1.0 + tl.exp(-found))
    if RENORMALIZE:
        found = found / tl.maximum(tl.sum(tl.where(there, found, 0.0), 0), floor)
    place = row * CHOSEN + slot
    tl.store(weights + place, found * scale, mask=there)
    tl.store(experts + place, names.to(tl.int64), mask=there)


def route_experts(
    logits_TX: torch.Tensor, config: MoEConfig, bias_X: torch.Tensor | None = None, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [T, S] (float32) and experts [T, S] (int64); see ``jackfield.layers.routing.route``."""
    tokens, count = logits_TX.shape
    weights = torch.empty((tokens, config.top_k), dtype=torch.float32, device=logits_TX.device)
    experts = torch.empty((tokens, config.top_k), dtype=torch.int64, device=logits_TX.device)
    if not tokens:
        return weights, experts
    logits = logits_TX if logits_TX.stride(1) == 1 else logits_TX.contiguous()
    groups = config.num_groups
    route_kernel[(tokens,)](
        logits,
        logits if bias_X is None else bias_X,
        weights,
        experts,
        count,
        logits.stride(0),
        count // groups,
        config.scale,
        config.floor,
        WIDTH=power_of_two(count),
        CHOSEN=config.top_k,
        SLOTS=power_of_two(config.top_k),
        SCORING=config.scoring,
        BIAS=bias_X is not None,
        GROUPS=groups,
        GROUP_WIDTH=power_of_two(groups),
        BEST=config.top_groups,
        TOP2=config.group_score == "top2",
        RENORMALIZE=config.renormalize,
        LAST=count - 1,
        num_warps=1 if count <= WIDE else 4,
        **launch_options(pdl),
    )
    return weights, experts
