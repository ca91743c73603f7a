# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""``draw_tokens`` as one Triton kernel: no sort, no copy of the logits, nothing asked of the host.

A row is one program. What top_k and top_p keep are the tokens above a threshold of the logits, and of those that lie
on it the first few. The threshold is searched for among the logits' bits, read as whole numbers of the same order:
each pass counts (or sums the weights of) the tokens above seven pivots, which narrows the range to an eighth. Rows are
long and few tokens matter: those that can are copied out first, where they fit, and the search goes over the copy.
Tokens are then drawn by the Gumbel trick (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030): the largest of weight
over an exponential number of the token's own, made from (seed, position, token) by a hash. Sums are formed in float32,
in an order that does not depend on other rows.

Legend: R rows, V vocabulary, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jackfield.interfaces import DrawBatch

BLOCK = 2048
"""Tokens that a program looks at at once while it searches."""
WIDE = 4096
"""The same while it goes over a whole row for little."""
STAGES = 3
MOST = 4096
"""Most tokens that are copied out."""
WARPS = 8
NEAR, MIDDLE, FAR = 0.05, 1e-3, 1e-5
"""Weights, relative to the largest, from which on tokens may be copied out."""
LOWEST, HIGHEST = -(2**31), 2**31 - 1


@triton.jit
def _key(logit):
    """Return int32 numbers in the order of float32 ones; minus zero counts as zero, NaN as the least."""
    value = tl.where(logit == logit, logit + 0.0, float("-inf"))
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mixed(x):
    """Return 32 bits in which every bit depends on all of ``x`` (the finalizer of MurmurHash3, by A. Appleby)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _exponential(seed, position, token):
    """Return exponential numbers of the tokens, float32 above zero."""
    low = _mixed((seed & 0xFFFFFFFF).to(tl.uint32) ^ 0x9E3779B9)
    high = _mixed(((seed >> 32) & 0xFFFFFFFF).to(tl.uint32) + low)
    place = _mixed(position.to(tl.uint32) * 0x9E3779B1 + high)
    bits = _mixed(_mixed(token.to(tl.uint32) + place) ^ low)
    # 23 bits, so that half a step from both ends is a number of its own.
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(uniform)


@triton.jit
def _weights(row, column, vocabulary, top, heat, least):
    """Return keys and weights of some tokens; those below ``least`` and behind the row's end weigh nothing."""
    logit = tl.load(row + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    weight = tl.exp((logit - top) * heat)
    weight = tl.where((weight >= least) & (logit > float("-inf")), weight, 0.0)
    return _key(logit), weight


@triton.jit
def _above(row, vocabulary, top, heat, least, low, high, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return seven pivots of [low, high) and, for each, how many tokens (or how much weight) reach it."""
    span = high - low
    p1, p2, p3, p4 = low + span // 8, low + span // 4, low + span * 3 // 8, low + span // 2
    p5, p6, p7 = low + span * 5 // 8, low + span * 3 // 4, low + span * 7 // 8
    s1 = tl.zeros((BLOCK,), tl.float32)
    s2 = tl.zeros((BLOCK,), tl.float32)
    s3 = tl.zeros((BLOCK,), tl.float32)
    s4 = tl.zeros((BLOCK,), tl.float32)
    s5 = tl.zeros((BLOCK,), tl.float32)
    s6 = tl.zeros((BLOCK,), tl.float32)
    s7 = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        key, weight = _weights(row, start + tl.arange(0, BLOCK), vocabulary, top, heat, least)
        value = weight
        if not BY_MASS:
            value = (weight > 0.0).to(tl.float32)
        wide = key.to(tl.int64)
        s1 += tl.where(wide >= p1, value, 0.0)
        s2 += tl.where(wide >= p2, value, 0.0)
        s3 += tl.where(wide >= p3, value, 0.0)
        s4 += tl.where(wide >= p4, value, 0.0)
        s5 += tl.where(wide >= p5, value, 0.0)
        s6 += tl.where(wide >= p6, value, 0.0)
        s7 += tl.where(wide >= p7, value, 0.0)
    return (
        p1, p2, p3, p4, p5, p6, p7,
        tl.sum(s1), tl.sum(s2), tl.sum(s3), tl.sum(s4), tl.sum(s5), tl.sum(s6), tl.sum(s7),
    )  # fmt: skip


@triton.jit
def _threshold(row, vocabulary, top, heat, least, low, high, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key that tokens with ``target`` in all reach (``low`` where there is none), and how much lies
    above it.
    """
    beyond = target * 0.0
    while high - low > 1:
        p1, p2, p3, p4, p5, p6, p7, n1, n2, n3, n4, n5, n6, n7 = _above(
            row, vocabulary, top, heat, least, low, high, BY_MASS, BLOCK
        )  # fmt: skip
        # From the highest pivot down: the first that enough tokens reach is the new low end.
        floor = low
        if n7 >= target:
            floor = p7
        else:
            high, beyond = p7, n7
            if n6 >= target:
                floor = p6
            else:
                high, beyond = p6, n6
                if n5 >= target:
                    floor = p5
                else:
                    high, beyond = p5, n5
                    if n4 >= target:
                        floor = p4
                    else:
                        high, beyond = p4, n4
                        if n3 >= target:
                            floor = p3
                        else:
                            high, beyond = p3, n3
                            if n2 >= target:
                                floor = p2
                            else:
                                high, beyond = p2, n2
                                if n1 >= target:
                                    floor = p1
                                else:
                                    high, beyond = p1, n1
        low = tl.maximum(low, floor)
    return low, beyond


@triton.jit
def _kept_mass(row, vocabulary, top, heat, least, border, ties, BLOCK: tl.constexpr):
    """Return the weight of the tokens above ``border`` and of the first ``ties`` on it."""
    total = tl.zeros((BLOCK,), tl.float32)
    one = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        key, weight = _weights(row, start + tl.arange(0, BLOCK), vocabulary, top, heat, least)
        total += tl.where(key.to(tl.int64) > border, weight, 0.0)
        one = tl.maximum(one, tl.where(key.to(tl.int64) == border, weight, 0.0))
    # Tokens on the border weigh the same.
    return tl.sum(total) + tl.max(one, 0) * ties, tl.max(one, 0)


@triton.jit
def _largest(row, vocabulary, WIDE: tl.constexpr, STAGES: tl.constexpr):
    """Return the largest logit and the first token that has it."""
    best = tl.full((WIDE,), float("-inf"), tl.float32)
    place = tl.full((WIDE,), 0x7FFFFFFF, tl.int32)
    for start in tl.range(0, vocabulary, WIDE, num_stages=STAGES):
        column = start + tl.arange(0, WIDE)
        logit = tl.load(row + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        better = logit > best
        best, place = tl.where(better, logit, best), tl.where(better, column, place)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, place, 0x7FFFFFFF), 0)


@triton.jit
def _candidates_from(
    row, vocabulary, top, heat, least, top_k, top_p, WIDE: tl.constexpr, STAGES: tl.constexpr, MOST: tl.constexpr,
    NEAR: tl.constexpr, MIDDLE: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Return a weight from which on the tokens are few and hold all that top_k and top_p keep, or 0 where there is
    none; and the weight of all tokens.
    """
    n1 = tl.zeros((WIDE,), tl.float32)
    n2 = tl.zeros((WIDE,), tl.float32)
    n3 = tl.zeros((WIDE,), tl.float32)
    m1 = tl.zeros((WIDE,), tl.float32)
    m2 = tl.zeros((WIDE,), tl.float32)
    m3 = tl.zeros((WIDE,), tl.float32)
    whole = tl.zeros((WIDE,), tl.float32)
    for start in tl.range(0, vocabulary, WIDE, num_stages=STAGES):
        _, weight = _weights(row, start + tl.arange(0, WIDE), vocabulary, top, heat, least)
        whole += weight
        n1 += (weight >= NEAR).to(tl.float32)
        n2 += (weight >= MIDDLE).to(tl.float32)
        n3 += (weight >= FAR).to(tl.float32)
        m1 += tl.where(weight >= NEAR, weight, 0.0)
        m2 += tl.where(weight >= MIDDLE, weight, 0.0)
        m3 += tl.where(weight >= FAR, weight, 0.0)
    # A little more than wanted: sums in another order must not move what lies on the border out of the copy.
    total = tl.sum(whole)
    mass = total * top_p * 1.0001
    count = 0.0
    if top_k > 0:
        mass, count = 0.0, top_k.to(tl.float32)
    c1, c2, c3 = tl.sum(n1), tl.sum(n2), tl.sum(n3)
    floor = 0.0
    if (c3 >= count) & (tl.sum(m3) >= mass) & (c3 <= MOST):
        floor = FAR
    if (c2 >= count) & (tl.sum(m2) >= mass) & (c2 <= MOST):
        floor = MIDDLE
    if (c1 >= count) & (tl.sum(m1) >= mass) & (c1 <= MOST):
        floor = NEAR
    return floor, total


@triton.jit
def _copied(
    row, values, tokens, vocabulary, top, heat, least, floor, WIDE: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Copy tokens that weigh ``floor`` or more out, in their order, and return how many they are."""
    count = tl.full((), 0, tl.int32)
    for start in tl.range(0, vocabulary, WIDE, num_stages=STAGES):
        column = start + tl.arange(0, WIDE)
        _, weight = _weights(row, column, vocabulary, top, heat, least)
        chosen = weight >= floor
        number = tl.sum(chosen.to(tl.int32))
        if number > 0:
            place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
            logit = tl.load(row + column, mask=chosen, other=0.0).to(tl.float32)
            tl.store(values + place, logit, mask=chosen)
            tl.store(tokens + place, column, mask=chosen)
            count += number
    return count


@triton.jit
def _drawn(
    row, tokens, length, top, heat, least, top_k, top_p, whole, seed, position, token, LOWEST: tl.constexpr,
    COPIED: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return a token drawn from ``row``, or ``token`` where nothing has weight. COPIED: ``row`` holds some logits only,
    and ``tokens`` whose they are; ``whole`` is then the weight of all, where top_p is of all, and otherwise 0.
    """
    border = tl.full((), LOWEST, tl.int64) - 1
    ties = tl.full((), 0.0, tl.float32)
    high = _key(top).to(tl.int64) + 1
    if top_k > 0:
        wanted = top_k.to(tl.float32)
        border, above = _threshold(row, length, top, heat, least, border, high, wanted, False, BLOCK)
        ties = wanted - above
    if top_p < 1.0:
        mass, on_border = _kept_mass(row, length, top, heat, least, border, ties, BLOCK)
        limit = tl.where(whole > 0.0, whole, mass) * top_p
        inner, above = _threshold(row, length, top, heat, least, border, high, limit, True, BLOCK)
        if inner > border:
            _, on_border = _kept_mass(row, length, top, heat, least, inner, 0.0, BLOCK)
            border = inner
            ties = tl.maximum(1.0, tl.ceil((limit - above) / on_border))
        else:
            if on_border > 0.0:
                ties = tl.minimum(ties, tl.maximum(0.0, tl.ceil((limit - above) / on_border)))
    best = tl.full((WIDE,), -1.0, tl.float32)
    place = tl.full((WIDE,), 0x7FFFFFFF, tl.int32)
    seen = tl.full((), 0.0, tl.float32)
    for start in tl.range(0, length, WIDE, num_stages=STAGES):
        column = start + tl.arange(0, WIDE)
        key, weight = _weights(row, column, length, top, heat, least)
        wide = key.to(tl.int64)
        on = ((wide == border) & (weight > 0.0)).to(tl.float32)
        number = tl.sum(on)
        kept = wide >= border
        if number > 0.0:
            kept = (wide > border) | ((wide == border) & (seen + tl.cumsum(on, 0) <= ties))
        weight = tl.where(kept, weight, 0.0)
        seen += number
        if tl.max(weight, 0) > 0.0:
            name = column
            if COPIED:
                name = tl.load(tokens + column, mask=column < length, other=0)
            score = tl.where(weight > 0.0, weight / _exponential(seed, position, name), -1.0)
            better = score > best
            best, place = tl.where(better, score, best), tl.where(better, name, place)
    most = tl.max(best, 0)
    return tl.where(most > 0.0, tl.min(tl.where(best == most, place, 0x7FFFFFFF), 0), token)


@triton.jit
def draw_kernel(
    logits, slots, positions, temperatures, top_ks, top_ps, min_ps, seeds, ids, values, tokens, vocabulary, row_stride,
    LOWEST: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, MOST: tl.constexpr,
    NEAR: tl.constexpr, MIDDLE: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Grid: (R,)."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * row_stride
    slot = tl.load(slots + index)
    temperature = tl.load(temperatures + slot)
    top, token = _largest(row, vocabulary, WIDE, STAGES)
    if (temperature > 0.0) & (top > float("-inf")):
        heat = 1.0 / temperature
        least = tl.load(min_ps + slot)
        top_k = tl.load(top_ks + slot)
        top_k = tl.where(top_k < vocabulary, top_k, 0)
        top_p = tl.load(top_ps + slot)
        seed, position = tl.load(seeds + slot), tl.load(positions + index)
        floor, whole = 0.0, 0.0
        if (top_k > 0) | (top_p < 1.0):
            floor, whole = _candidates_from(
                row, vocabulary, top, heat, least, top_k, top_p, WIDE, STAGES, MOST, NEAR, MIDDLE, FAR
            )  # fmt: skip
        if floor > 0.0:
            own_values, own_tokens = values + index * MOST, tokens + index * MOST
            count = _copied(row, own_values, own_tokens, vocabulary, top, heat, least, floor, WIDE, STAGES)
            # What this program's threads stored, its other threads read.
            tl.debug_barrier()
            token = _drawn(
                own_values, own_tokens, count, top, heat, least, top_k, top_p, tl.where(top_k > 0, 0.0, whole), seed,
                position, token, LOWEST, True, BLOCK, WIDE, STAGES,
            )  # fmt: skip
        else:
            token = _drawn(
                row, tokens, vocabulary, top, heat, least, top_k, top_p, 0.0, seed, position, token, LOWEST, False,
                BLOCK, WIDE, STAGES,
            )  # fmt: skip
    # A row without a number, or of NaN, has no best token; any id is better than one that is none.
    tl.store(ids + index, tl.minimum(token, vocabulary - 1).to(tl.int64))


def draw_tokens(logits_RV: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
    """Return [R] sampled ids (int64). Logits of any float type, contiguous inside a row; they are not changed."""
    rows, vocabulary = logits_RV.shape
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    ids = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if not rows:
        return ids
    positions = torch.from_numpy(batch.positions.astype("int64"))
    if logits_RV.is_cuda:
        positions = positions.pin_memory().to(logits_RV.device, non_blocking=True)
    values = torch.empty((rows, MOST), dtype=torch.float32, device=logits_RV.device)
    tokens = torch.empty((rows, MOST), dtype=torch.int32, device=logits_RV.device)
    draw_kernel[(rows,)](
        logits_RV,
        batch.slots_device,
        positions,
        batch.numbers["temperature"],
        batch.top_k,
        batch.numbers["top_p"],
        batch.numbers["min_p"],
        batch.seeds,
        ids,
        values,
        tokens,
        vocabulary,
        logits_RV.stride(0),
        LOWEST=LOWEST,
        BLOCK=BLOCK,
        WIDE=WIDE,
        STAGES=STAGES,
        MOST=MOST,
        NEAR=NEAR,
        MIDDLE=MIDDLE,
        FAR=FAR,
        num_warps=WARPS,
    )
    return ids
