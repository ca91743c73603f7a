"""How products of few rows are launched: a pure function of rows T, outputs O, inputs I and multiprocessors.

The rules come from a sweep on an H200 (``benchmarks/gpu_dense.py``) over the matrices of two models, with weights
that do not stay in the cache. At one row the launches chosen here take 0.84 to 0.98 of torch's time on weights of 16 Mi
elements and more, and 0.35 to 0.98 on smaller ones.

What is said of wide weights (more outputs than inputs) at 2 to ``WIDE_ROWS`` rows is counted, not measured. Alone,
torch's product is a few per cent ahead there. But every other kernel of a step starts while the one before drains, and
torch's do not: steps of 30 layers of 576 took 754 microseconds at one row and 877 at two (the same machine,
``benchmarks/results/h200-sixth/rounds.jsonl``), up to 2 for each wide product. And beside torch's product the norm and
the activation are launches of their own. ``benchmarks/gpu_dense.py --chains`` times both ways; ``WIDE_ROWS``,
``WIDE_MOST`` and ``NARROW_ROWS`` are what to change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_ROWS = 16
"""More rows than these are torch's."""
FEW_ROWS = 4
"""Up to these rows, sums can be formed without matrix units."""
MOST_SPLITS = 16
LARGE = 64 << 20
"""From so many elements on, programs along O alone fill a device several times over."""
SMALLEST = 1 << 18
"""Weights of fewer elements are torch's: launching costs more than reading."""
SHORT = 8 << 20
"""Programs of weights of so few elements see a tile or two: what counts is to ask for all of it at once."""
WIDE_ROWS = 8
"""Up to these rows wide weights are launched here, along with what is beside them; at 1 they are torch's."""
WIDE_MOST = LARGE
"""Wide weights of more elements than these are torch's; ``SHORT`` leaves those of a tile or two."""
WIDE_TILE = 512
"""Inputs of a tile, of which a program holds two before it waits: all of its weight where rows are no longer."""
NARROW_ROWS = 8
"""Up to these rows short weights of 8-bit numbers are launched here; at 1 more rows are quantized for torch."""
ALIGNMENT = 16
"""Rows of weight must be whole 16-byte loads, which the compiler recognizes at multiples of 16 elements."""
GATES = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "gelu_tanh_and_mul": "gelu_tanh"}
"""Activations of kernels, by op."""
NOTHING: frozenset[str] = frozenset()
BEHIND = frozenset(GATES)
AROUND = BEHIND | {"rms_norm", "fused_add_rms_norm"}
"""Ops that a launch may fold: those after the product, and with those before it."""
SPLIT_COST = 0.01
"""What one more split must gain, as a share of the time."""


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """One way to launch.

    Args:
        block_o: rows of weight of a program. block_i: inputs in a tile. splits: programs that share those rows, each
            with a part of I. warps: of a program. stages: tiles in flight; 1: none ahead. matrix: on matrix units, with
            T padded to 8 or 16, instead of multiplying and adding tile by tile (T up to 4). slices: with ``matrix``,
            parts of a tile's inputs that are multiplied side by side, best as many as there are warps; 1: warps share
            all inputs of a tile. registers: most of a thread; 0: as many as the compiler takes.
    """

    block_o: int
    block_i: int
    splits: int
    warps: int
    stages: int
    matrix: bool
    slices: int = 1
    registers: int = 0


def skinny_shape(rows: int, outputs: int, inputs: int, cores: int) -> SkinnyShape | None:
    """Return the launch of ``x [rows, inputs] @ W [outputs, inputs].T``, or None where torch's product is as good.

    Args:
        rows: T. outputs: O. inputs: I. cores: multiprocessors of the device.
    """
    if not 0 < rows <= MOST_ROWS or inputs % ALIGNMENT or outputs * inputs < SMALLEST:
        return None
    if rows == 1:
        return _one_row(outputs, inputs, cores)
    if outputs * inputs >= LARGE:
        return SkinnyShape(64, 128, 1, 4, 4, True)
    if outputs > inputs:
        return _wide(outputs, inputs, cores) if rows <= WIDE_ROWS and outputs * inputs <= WIDE_MOST else None
    if outputs * inputs <= SHORT:
        if rows <= FEW_ROWS:
            return SkinnyShape(4, 1024, 1, 4, 1, False)
        return filled(SkinnyShape(32, 256, 0, 4, 4, True), outputs, inputs, cores, 2)
    if rows == 2:
        return SkinnyShape(8, 512, 1, 4, 3, False)
    return filled(SkinnyShape(64, 128, 0, 4, 4, True), outputs, inputs, cores, 2)


def _one_row(outputs: int, inputs: int, cores: int) -> SkinnyShape:
    if outputs * inputs >= LARGE:
        return SkinnyShape(16, 512, 1, 4, 3, False)
    if outputs * inputs > SHORT:
        return SkinnyShape(8, 512, 1, 4, 3, False)
    if outputs >= 4 * inputs:
        return SkinnyShape(4, 512, 1, 2, 1, False)
    if inputs >= 3 * outputs:
        return filled(SkinnyShape(4, 1024, 0, 4, 1, False), outputs, inputs, cores, 4)
    return SkinnyShape(4, 1024, 1, 4, 1, False)


def _wide(outputs: int, inputs: int, cores: int) -> SkinnyShape:
    """Return the launch of a wide weight at 2 to ``WIDE_ROWS`` rows. It has no splits, so that norms can be folded; as
    every program computes the norm for itself, there are not more programs than the device needs. Where they hold all
    of their weight, two must fit a multiprocessor, so that none waits for another to end.
    """
    if outputs * inputs > SHORT:
        return SkinnyShape(64, 128, 1, 4, 4, True)
    if inputs > 2 * WIDE_TILE:
        return SkinnyShape(32, 256, 1, 4, 4, True, slices=4)
    return SkinnyShape(16 if outputs <= 16 * cores else 32, WIDE_TILE, 1, 8, 1, True, slices=8, registers=128)


def narrow_shape(rows: int, outputs: int, inputs: int, cores: int) -> SkinnyShape | None:
    """Return the launch of rows times a weight of 8-bit numbers, or None where torch's product is as good. Of several
    rows that is so unless the weight is short: torch takes rows that a kernel has quantized, and another scales what it
    returns, which is made up for where there is much to read. Tiles are longer than for wider types, since what counts
    are the bytes in flight.
    """
    shape = skinny_shape(rows, outputs, inputs, cores) if rows <= NARROW_ROWS else None
    if shape is None or outputs * inputs <= SHORT:
        return shape
    if rows > 1:
        return None
    if outputs * inputs >= LARGE:
        return SkinnyShape(4, 1024, 1, 2, 4, False)
    return SkinnyShape(8, 1024 if inputs >= 2 * outputs else 512, 1, 4, 3, False)


def foldable_ops(rows: int, shape: SkinnyShape | None) -> frozenset[str]:
    """Return the ops that a launch computes along with its product."""
    if shape is None or shape.block_o < 2:
        return NOTHING
    normed = shape.splits == 1 and (shape.matrix or rows == 1)
    return AROUND if normed else BEHIND


def filled(shape: SkinnyShape, outputs: int, inputs: int, cores: int, fill: int) -> SkinnyShape:
    """Return ``shape`` with as many splits as it takes to give each multiprocessor ``fill`` programs."""
    splits = splits_for(-(-outputs // shape.block_o), -(-inputs // shape.block_i), cores, fill)
    return replace(shape, splits=splits)


def filled_splits(blocks: int, tiles: int, cores: int) -> int:
    """Return in how many parts to cut I so that each multiprocessor has two programs."""
    return splits_for(blocks, tiles, cores, 2)


def splits_for(blocks: int, tiles: int, cores: int, fill: int) -> int:
    """Return in how many parts to cut I so that multiprocessors share the work evenly.

    Args:
        blocks: programs along O. tiles: tiles along I. cores: multiprocessors. fill: programs wanted on each.
    """
    most = min(MOST_SPLITS, tiles)
    enough = [splits for splits in range(1, most + 1) if 10 * blocks * splits >= 9 * fill * cores]
    return max(enough, key=lambda splits: _evenness(blocks, tiles, cores, splits), default=most)


def counters_for(outputs: int, inputs: int, cores: int) -> int:
    """Return how many arrival counters launches of up to 16 rows need."""
    shapes = [skinny_shape(rows, outputs, inputs, cores) for rows in range(1, MOST_ROWS + 1)]
    shapes.append(narrow_shape(1, outputs, inputs, cores))
    return max((-(-outputs // s.block_o) for s in shapes if s is not None and s.splits > 1), default=0)


def _evenness(blocks: int, tiles: int, cores: int, splits: int) -> float:
    """Return the share of time in which programs and multiprocessors are busy, less what splits cost."""
    programs = blocks * splits
    balance = programs / (-(-programs // cores) * cores)
    return balance * tiles / (-(-tiles // splits) * splits) - SPLIT_COST * splits
