"""Launches of Mamba-2 over chunks. Legend: T tokens, H heads, V size of a head, G groups, N states, C chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from jackfield_attention.triton_ssd_kernels import (
    ssd_decay_kernel,
    ssd_outputs_kernel,
    ssd_scores_kernel,
    ssd_states_kernel,
    ssd_walk_kernel,
)
from jackfield_attention.triton_state_chunks import LARGE, SMALL, Chunks
from jackfield_triton.launch import power_of_two

LEAST = 16
"""Least size of a side of a matrix product."""
STATE_TILE = 64
"""Most keys, and most values, of a state that a program holds."""
MOST_KEYS = 256
"""Most keys of c that a program keeps for all its heads; half of it where multiprocessors have less room."""
HEADS_TILE = 16
HEADS_EACH = (8, 4, 2)
"""Heads that share a program's products of c and b. No number is one that launches would be compiled for anew."""
PROGRAMS_PER_CORE = 4
WALKS_PER_CORE: float | None = None
"""From so many walks on, outputs are written by them; never, until a device has run that."""
MOST_WALK_KEYS = 128
"""Of a state that a walk has in its registers."""
WALK_WARPS, WALK_STAGES = 8, 3
"""With four warps, two programs fit a multiprocessor, and a few registers do not."""
PRECISIONS: Mapping[torch.dtype, str] = {torch.float32: "tf32x3", torch.float16: "tf32", torch.bfloat16: "ieee"}
"""Of products, by type of the inputs. Decayed values may leave the range of float16; tf32 has as many digits, and the
range of float32.
"""


@dataclass(frozen=True, slots=True)
class SsdInputs:
    """Tokens: x [T, H, V], dt [T, H], b, c [T, G, N], features of a head contiguous. Constants: a, d, dt_bias [H].
    ``limits`` of dt, behind the softplus.
    """

    x: torch.Tensor
    dt: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    limits: tuple[float, float]

    @property
    def product_type(self) -> torch.dtype:
        """The type of what products read."""
        return torch.bfloat16 if self.x.dtype == torch.bfloat16 else torch.float32


@dataclass(frozen=True, slots=True)
class Between:
    """What the kernels hand on: steps, totals [C, H, rows] float32, and ``products``: states before chunks
    [C, H, N, V], or, where walks write outputs, products of c and b in parts of SMALL tokens [parts, G, SMALL, SMALL].
    """

    steps: torch.Tensor
    totals: torch.Tensor
    products: torch.Tensor


def ssd(
    inputs: SsdInputs, plane: torch.Tensor, pages: torch.Tensor, chunks: Chunks, out_THV: torch.Tensor, cores: int
) -> None:
    """Advance the states of sequences with several new tokens, and write their outputs.

    Args:
        inputs: of all tokens. plane: [pages, H, N, V] float32, a page contiguous. pages: [B, 2] int64 before and after.
        out_THV: features of a head contiguous. cores: multiprocessors.
    """
    (_, heads, values), keys = inputs.x.shape, inputs.b.shape[2]
    count = len(chunks.table)
    numbers = inputs.x.new_empty((2, count, heads, chunks.rows), dtype=torch.float32)
    walks = len(chunks.owners) * heads * -(-values // tile_of(values, STATE_TILE))
    alone = chunks.rows == LARGE and walks_alone(walks, keys, cores)
    shape = (count * chunks.rows // SMALL, inputs.b.shape[1], SMALL, SMALL) if alone else (count, *plane.shape[1:])
    made = Between(numbers[0], numbers[1], inputs.x.new_empty(shape, dtype=inputs.product_type))
    _decays(inputs, made, chunks)
    if alone:
        _scores(inputs, made, chunks)
        _walk_alone(inputs, made, plane, pages, chunks, out_THV)
    else:
        _walk(inputs, made, plane, pages, chunks)
        _outputs(inputs, made, chunks, out_THV, cores)


def walks_alone(walks: int, keys: int, cores: int) -> bool:
    """Return whether walks over sequences write outputs: they must be many, since one takes its chunks in turns. They
    need the room that large chunks need.

    Args:
        walks: programs that walk. keys: N. cores: multiprocessors.
    """
    return WALKS_PER_CORE is not None and keys <= MOST_WALK_KEYS and walks >= WALKS_PER_CORE * cores


def _decays(inputs: SsdInputs, made: Between, chunks: Chunks) -> None:
    heads = inputs.dt.shape[1]
    ssd_decay_kernel[(len(chunks.table), -(-heads // HEADS_TILE))](
        inputs.dt,
        inputs.dt_bias,
        inputs.a,
        made.steps,
        made.totals,
        chunks.table,
        chunks.query_start,
        inputs.dt.stride(0),
        *map(float, inputs.limits),
        HEADS=heads,
        ROWS=chunks.rows,
        TILE=HEADS_TILE,
        num_warps=4,
    )


def _walk(inputs: SsdInputs, made: Between, plane: torch.Tensor, pages: torch.Tensor, chunks: Chunks) -> None:
    x, b = inputs.x, inputs.b
    (_, heads, values), (_, groups, keys) = x.shape, b.shape
    n_tile, v_tile = tile_of(keys, STATE_TILE), tile_of(values, STATE_TILE)
    n_tiles, v_tiles = -(-keys // n_tile), -(-values // v_tile)
    ssd_states_kernel[(heads * n_tiles * v_tiles, len(chunks.owners))](
        x,
        b,
        made.steps,
        made.totals,
        plane,
        made.products,
        pages,
        chunks.owners,
        chunks.query_start,
        *x.stride()[:2],
        *b.stride()[:2],
        plane.stride(0),
        HEADS=heads,
        REPEATS=heads // groups,
        N=keys,
        V=values,
        N_TILES=n_tiles,
        N_TILE=n_tile,
        V_TILE=v_tile,
        ROWS=chunks.rows,
        PRECISION=PRECISIONS[x.dtype],
        num_warps=4,
        num_stages=3 if inputs.product_type == torch.bfloat16 else 1,
    )


def _outputs(inputs: SsdInputs, made: Between, chunks: Chunks, out_THV: torch.Tensor, cores: int) -> None:
    x, b, c = inputs.x, inputs.b, inputs.c
    (_, heads, values), (_, groups, keys) = x.shape, b.shape
    narrow, large = inputs.product_type == torch.bfloat16, chunks.rows == LARGE
    most = (MOST_KEYS if large else MOST_KEYS // 2) if narrow else STATE_TILE
    n_tile, v_tile = tile_of(keys, most), tile_of(values, STATE_TILE)
    n_tiles, v_tiles, repeats = -(-keys // n_tile), -(-values // v_tile), heads // groups
    each = heads_each(len(chunks.table) * groups * v_tiles, repeats, cores)
    ssd_outputs_kernel[(groups * -(-repeats // each) * v_tiles, len(chunks.table))](
        x,
        b,
        c,
        inputs.d,
        made.steps,
        made.totals,
        made.products,
        out_THV,
        chunks.table,
        chunks.query_start,
        *x.stride()[:2],
        *b.stride()[:2],
        *c.stride()[:2],
        *out_THV.stride()[:2],
        each,
        HEADS=heads,
        REPEATS=repeats,
        N=keys,
        V=values,
        N_TILES=n_tiles,
        N_TILE=n_tile,
        V_TILES=v_tiles,
        V_TILE=v_tile,
        ROWS=chunks.rows,
        PRECISION=PRECISIONS[x.dtype],
        num_warps=8 if large or n_tiles > 1 or not narrow else 4,
        num_stages=2 if narrow and n_tiles == 1 else 1,
    )


def _scores(inputs: SsdInputs, made: Between, chunks: Chunks) -> None:
    b, c = inputs.b, inputs.c
    _, groups, keys = b.shape
    n_tile = tile_of(keys, STATE_TILE)
    ssd_scores_kernel[(groups, len(made.products))](
        b,
        c,
        made.products,
        chunks.table,
        chunks.query_start,
        *b.stride()[:2],
        *c.stride()[:2],
        N=keys,
        N_TILES=-(-keys // n_tile),
        N_TILE=n_tile,
        CHUNK=chunks.rows,
        ROWS=SMALL,
        PRECISION=PRECISIONS[b.dtype],
        num_warps=4,
    )


def _walk_alone(
    inputs: SsdInputs, made: Between, plane: torch.Tensor, pages: torch.Tensor, chunks: Chunks, out_THV: torch.Tensor
) -> None:
    x, b, c = inputs.x, inputs.b, inputs.c
    (_, heads, values), (_, groups, keys) = x.shape, b.shape
    v_tile = tile_of(values, STATE_TILE)
    ssd_walk_kernel[(heads * -(-values // v_tile), len(chunks.owners))](
        x,
        b,
        c,
        inputs.d,
        made.steps,
        made.totals,
        made.products,
        plane,
        out_THV,
        pages,
        chunks.owners,
        chunks.query_start,
        *x.stride()[:2],
        *b.stride()[:2],
        *c.stride()[:2],
        *out_THV.stride()[:2],
        plane.stride(0),
        HEADS=heads,
        REPEATS=heads // groups,
        N=keys,
        V=values,
        N_TILE=tile_of(keys, MOST_WALK_KEYS),
        V_TILE=v_tile,
        CHUNK=chunks.rows,
        ROWS=SMALL,
        PRECISION=PRECISIONS[x.dtype],
        num_warps=WALK_WARPS,
        num_stages=WALK_STAGES if inputs.product_type == torch.bfloat16 else 1,
    )


def tile_of(size: int, most: int) -> int:
    """Return how many of ``size`` numbers a program takes at once."""
    return min(most, max(LEAST, power_of_two(size)))


def heads_each(programs: int, repeats: int, cores: int) -> int:
    """Return how many heads of a group a program takes: many share products, but all multiprocessors must have work.

    Args:
        programs: how many there would be if one took all ``repeats`` heads of a group. cores: multiprocessors.
    """
    enough = PROGRAMS_PER_CORE * cores
    return next((each for each in HEADS_EACH if programs * -(-repeats // each) >= enough), HEADS_EACH[-1])
