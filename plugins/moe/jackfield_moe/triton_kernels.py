# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Grouped products of rows with the matrices of their experts.

Legend: P ``pairs`` of a row and one of its experts, numbered row by row; X experts; B ``blocks`` of ROWS pairs that
share an expert; I ``inputs``, O ``outputs``. ``order`` [B, ROWS] has the pairs of each block, P where there is none;
``owners`` [B] the expert of each, -1 where a block is empty. Sums are formed in float32, in an order that depends on
sizes alone. PDL: the launch is a programmatic dependent one (``jackfield_triton.launch``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from jackfield_triton.activation import activated as activated_alone


@triton.jit
def _counted(experts, first, pairs, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Return how many of BLOCK pairs each expert has. The last bin is nobody's: EXPERTS is above their number."""
    at = first + tl.arange(0, BLOCK)
    owner = tl.load(experts + at, mask=at < pairs, other=-1).to(tl.int32)
    return tl.histogram(tl.where(owner < 0, EXPERTS - 1, owner), EXPERTS)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(
    experts, counts, pairs, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Count the pairs of each expert in each chunk of BLOCK; grid: (chunks,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    which = tl.arange(0, EXPERTS)
    found = _counted(experts, chunk * BLOCK, pairs, BLOCK, EXPERTS)
    tl.store(counts + chunk * num_experts + which, found, mask=which < num_experts)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def place_kernel(
    experts, counts, order, owners, places, pairs, num_experts, blocks, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fill the blocks of each expert, pairs in their order; grid: (X + 1, chunks of BLOCK pairs). The last programs
    mark empty blocks. CHUNKS bounds the chunks; of one, programs count for themselves. PLACES: they are wanted.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    which = tl.arange(0, EXPERTS)
    chunk = tl.program_id(1)
    earlier = tl.zeros((EXPERTS,), tl.int32)
    if CHUNKS == 1:
        held = _counted(experts, 0, pairs, BLOCK, EXPERTS)
    else:
        every = tl.arange(0, CHUNKS)[:, None]
        mask = (every * BLOCK < pairs) & (which < num_experts)[None, :]
        found = tl.load(counts + every * num_experts + which[None, :], mask=mask, other=0)
        held = tl.sum(found, 0)
        earlier = tl.sum(tl.where(every < chunk, found, 0), 0)
    held = tl.where(which < num_experts, held, 0)
    needed = (held + ROWS - 1) // ROWS
    first_block = tl.sum(tl.where(which < expert, needed, 0), 0)
    last_block = first_block + tl.sum(tl.where(which == expert, needed, 0), 0)
    owner = expert
    if expert == num_experts:
        last_block = first_block * 0 + blocks
        owner = expert * 0 - 1
    if chunk == 0:
        for block in range(first_block, last_block):
            tl.store(owners + block, owner)
    place = first_block * ROWS + tl.sum(tl.where(which == expert, earlier, 0), 0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    mine = (tl.load(experts + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
    slot = place + tl.cumsum(mine, 0) - 1
    tl.store(order + slot, at, mask=mine > 0)
    if PLACES:
        tl.store(places + at, slot, mask=mine > 0)
    if (chunk + 1) * BLOCK >= pairs:
        rest = place + tl.sum(mine, 0) + tl.arange(0, ROWS)
        tl.store(order + rest, rest * 0 + pairs, mask=rest < last_block * ROWS)


@triton.jit
def _number_of_four_bits(code):
    """Return E2M1 numbers: a sign, two bits of exponent, one of mantissa."""
    size = code & 7
    exponent = size >> 1
    half = (size & 1).to(tl.float32) * 0.5
    value = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where(code > 7, -value, value)


@triton.jit
def weight_tile(
    weight, scale, zero, row, depth, inside, w_row, s_row, LAYOUT: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the numbers of outputs ``row`` and inputs ``depth``, which are broadcast, in DTYPE; zero where not
    ``inside``. Scales that belong to whole rows (GROUP 0) are left to the end.
    """
    PACKED: tl.constexpr = LAYOUT == "int4" or LAYOUT == "mxfp4"
    if PACKED:
        stored = tl.load(weight + row * w_row + depth // 2, mask=inside, other=0).to(tl.int32)
        stored = (stored >> ((depth % 2) * 4)) & 15
    else:
        stored = tl.load(weight + row * w_row + depth, mask=inside, other=0.0)
    if GROUP == 0:
        if LAYOUT == "int4":
            stored = stored - 8
        return stored.to(DTYPE)
    else:
        group = row // SCALE_ROWS * s_row + depth // GROUP
        factor = tl.load(scale + group, mask=inside, other=0)
        if LAYOUT == "mxfp4":
            value = _number_of_four_bits(stored) * tl.exp2(factor.to(tl.float32) - 127.0)
        else:
            value = stored.to(tl.float32)
            if LAYOUT == "int4":
                if ZERO:
                    value -= tl.load(zero + group, mask=inside, other=0).to(tl.float32)
                else:
                    value -= 8.0
            value *= factor.to(tl.float32)
        return value.to(DTYPE)


@triton.jit
def _next_tile(
    weight, scale, zero, column, depth, outputs, inputs, first, w_row, s_row, first_row, start, LAYOUT: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZERO: tl.constexpr, TMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the tile by the copy engine, or as ``weight_tile`` does."""
    if TMA:
        return weight.load([first_row + first, start]).T.to(DTYPE)
    else:
        inside = (depth[:, None] < inputs) & (column[None, :] < outputs)
        return weight_tile(
            weight, scale, zero, (first + column)[None, :], depth[:, None], inside, w_row, s_row, LAYOUT, GROUP,
            SCALE_ROWS, ZERO, DTYPE,
        )  # fmt: skip


@triton.jit
def _prepared(x, pair, pairs, x_row, CHOSEN: tl.constexpr, EVEN: tl.constexpr):
    """Return (the row of each pair, pointers to the rows)."""
    row = (pair // CHOSEN).to(tl.int64)
    if EVEN:
        row = tl.minimum(row, pairs // CHOSEN - 1)  # what is read for no pair is not written
    return row, x + row[:, None] * x_row


@triton.jit
def _row_tile(x_rows, there, depth, inputs, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x_rows + depth[None, :])
    else:
        return tl.load(x_rows + depth[None, :], mask=there & (depth[None, :] < inputs), other=0.0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr, GATED: tl.constexpr, alpha, limit):
    """Return the activation of the gate, times up where there is one."""
    if ACTIVATION == "swiglu_oai":
        gate = tl.minimum(gate, limit)
        return (tl.minimum(tl.maximum(up, -limit), limit) + 1.0) * gate * _sigmoid(alpha * gate)
    if ACTIVATION == "swiglu_step":
        return tl.minimum(gate * _sigmoid(gate), limit) * tl.minimum(tl.maximum(up, -limit), limit)
    if ACTIVATION == "situ":
        bound = tl.where(limit > 0.0, limit, 1.0)
        up = tl.where(limit > 0.0, bound * _tanh(up / bound), up)
        return alpha * _tanh(gate / alpha) * _sigmoid(gate) * up
    if ACTIVATION == "relu2":
        value = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    elif ACTIVATION == "relu":
        value = tl.maximum(gate, 0.0)
    else:
        value = activated_alone(gate, ACTIVATION)
    if GATED:
        value *= up
    return value


@triton.jit
def _finished(total, scale, bias, x_scale, column, outputs, first, s_row, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr):
    """Return the sums with scales of whole rows and biases; ``x_scale`` [ROWS, 1] is of quantized activations."""
    total *= x_scale
    if ROW_SCALE:
        factor = tl.load(scale + (first + column) * s_row, mask=column < outputs, other=0.0)
        total *= factor.to(tl.float32)[None, :]
    if BIAS:
        added = tl.load(bias + first + column, mask=column < outputs, other=0.0)
        total += added.to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["pairs", "blocks"])
def experts_kernel(
    x, x_scale, weight, scale, zero, bias, factors, out, order, owners, pairs, blocks, outputs, inputs, x_row,
    w_expert, w_row, s_expert, s_row, b_expert, out_row, alpha, limit, CHOSEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SWIZZLE: tl.constexpr, LAYOUT: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr, ZERO: tl.constexpr, NARROW: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, WEIGH: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply each block's rows with its expert's matrix; grid: (B * parts of COLUMNS outputs,).

    CHOSEN: pairs that share a row of ``x``. SWIZZLE: blocks whose programs follow one another. GROUP: inputs that share
    a scale, SCALE_ROWS outputs; ROW_SCALE: whole rows share one. NARROW: ``x`` is 8-bit floats with a scale for each
    row, and so is the weight. ACTIVATION: "" for none; GATED: gate and up are the first and second ``outputs`` rows.
    WEIGH: results are multiplied by ``factors`` [P]. EVEN: inputs are whole tiles. TMA: ``weight`` is a descriptor of
    tiles of COLUMNS x DEPTH in the rows of all experts, with ``w_expert`` rows for each; then EVEN holds.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    parts = tl.cdiv(outputs, COLUMNS)
    program = tl.program_id(0)
    begin = program // (SWIZZLE * parts) * SWIZZLE
    together = tl.minimum(blocks - begin, SWIZZLE)
    within = program % (SWIZZLE * parts)
    block = begin + within % together
    owner = tl.load(owners + block)
    if owner >= 0:
        column = within // together * COLUMNS + tl.arange(0, COLUMNS)
        pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
        there = (pair < pairs)[:, None]
        row, x_rows = _prepared(x, pair, pairs, x_row, CHOSEN, EVEN)
        expert = owner.to(tl.int64)
        first_row = owner * w_expert + within // together * COLUMNS
        if not TMA:
            weight += expert * w_expert
        scale += expert * s_expert
        zero += expert * s_expert
        bias += expert * b_expert
        DTYPE: tl.constexpr = x.dtype.element_ty
        inside = tl.arange(0, DEPTH)
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, inputs, DEPTH):
            depth = start + inside
            tile = _row_tile(x_rows, there, depth, inputs, EVEN)
            other = _next_tile(
                weight, scale, zero, column, depth, outputs, inputs, 0, w_row, s_row, first_row, start, LAYOUT, GROUP,
                SCALE_ROWS, ZERO, TMA, DTYPE,
            )  # fmt: skip
            gate = tl.dot(tile, other, gate, input_precision=PRECISION)
            if GATED:
                other = _next_tile(
                    weight, scale, zero, column, depth, outputs, inputs, outputs, w_row, s_row, first_row, start,
                    LAYOUT, GROUP, SCALE_ROWS, ZERO, TMA, DTYPE,
                )  # fmt: skip
                up = tl.dot(tile, other, up, input_precision=PRECISION)
        wide = tl.load(x_scale + row[:, None], mask=there, other=0.0) if NARROW else 1.0
        gate = _finished(gate, scale, bias, wide, column, outputs, 0, s_row, ROW_SCALE, BIAS)
        if GATED:
            up = _finished(up, scale, bias, wide, column, outputs, outputs, s_row, ROW_SCALE, BIAS)
        if ACTIVATION != "":
            gate = activated(gate, up, ACTIVATION, GATED, alpha, limit)
        if WEIGH:
            gate *= tl.load(factors + pair[:, None], mask=there, other=0.0).to(tl.float32)
        place = out + pair.to(tl.int64)[:, None] * out_row + column[None, :]
        tl.store(place, gate.to(out.dtype.element_ty), mask=there & (column < outputs)[None, :])


@triton.jit
def sum_kernel(
    parts, experts, places, out, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PARTIAL: tl.constexpr,
    PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the CHOSEN results of each row; grid: (rows, parts of the width). PARTIAL: those of the expert -1 are not.
    PLACES: results are in their order, and else in that of pairs.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for chosen in tl.static_range(CHOSEN):
        pair = row * CHOSEN + chosen
        mask, there = inside, True
        if PARTIAL:
            there = tl.load(experts + pair) >= 0
            mask = inside & there
        if PLACES:
            pair = tl.load(places + pair, mask=there, other=0).to(tl.int64)
        total += tl.load(parts + pair * width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)
