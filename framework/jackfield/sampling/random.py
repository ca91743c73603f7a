"""Random numbers that depend only on (seed, position): reproducible whatever else is in the batch, and without state
to keep.

A 64-bit finalizer (the one of SplitMix64, Steele et al. 2014, doi:10.1145/2660193.2660195) is applied to the seed and
then to its sum with the position.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_GOLDEN = -0x61C8864680B583EB


def uniform(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    """Return [R] float64 numbers in [0, 1), one per (seed, position); both int64."""
    mixed = _mix(_mix(seeds_R) + positions_R * _GOLDEN)
    return _shift_right(mixed, 11).to(torch.float64) * 2.0**-53


def stream(seeds_R: torch.Tensor, number: int, starts_R: torch.Tensor) -> torch.Tensor:
    """Return [R] seeds of another stream of numbers, independent of the requests' own.

    Args:
        number: of the stream, from 1. starts_R: int64; another start is another stream.
    """
    return _mix(_mix(seeds_R) ^ number) + starts_R * _GOLDEN


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the logical (unsigned) shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
