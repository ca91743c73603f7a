"""Numbers out of packed checkpoint tensors: small integers in 32-bit words, four-bit floats, exponents, block scales.

Everything works along the last dimension unless said otherwise, on any device, and returns a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

WORD = 32
"""Bits of a packed word."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word holds each of eight neighbouring columns (AWQ's ``gemm`` version)."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of four bits, sign first (OCP Microscaling 1.0)."""

E2M3 = tuple(
    sign * (n / 8.0 if n < 8 else (1 + n % 8 / 8.0) * 2.0 ** (n // 8 - 1)) for sign in (1.0, -1.0) for n in range(32)
)
"""The numbers of six bits, sign first (OCP Microscaling 1.0)."""

E3M2 = tuple(
    sign * (n / 16.0 if n < 4 else (1 + n % 4 / 4.0) * 2.0 ** (n // 4 - 3)) for sign in (1.0, -1.0) for n in range(32)
)
"""The numbers of six bits with the wider span, sign first (OCP Microscaling 1.0)."""

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution (QLoRA, arXiv:2305.14314, appendix E)."""

_FP4_HALF = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(sign * value / 12.0 for sign in (1.0, -1.0) for value in _FP4_HALF)
"""bitsandbytes' own numbers of four bits, sign first, the largest being 1."""

E8M0_BIAS = 127
E8M0_NAN = 255


def unpack_words(words: torch.Tensor, bits: int, dim: int = -1, order: Sequence[int] = ()) -> torch.Tensor:
    """Return unsigned integers of ``bits`` bits, the lowest bits first, as int32.

    Args:
        words: [..., W] int32. bits: of a number; where 32 is no multiple of it, the words are one stream of bits, and
            numbers may begin in one word and end in the next (GPTQ's 3 bits). dim: dimension that is packed. order:
            place inside its word of each number, where they are not in order.

    Returns:
        [..., W * 32 / bits] along ``dim``.
    """
    words = words.movedim(dim, -1)
    values = _per_word(words, bits) if WORD % bits == 0 else _stream(words, bits)
    if order:
        picked = torch.tensor(order, device=values.device)
        values = torch.unflatten(values, -1, (-1, len(order))).index_select(-1, picked).flatten(-2)
    return values.movedim(-1, dim)


def packed_words(values: torch.Tensor, bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Return int32 words of unsigned numbers along the last dimension, which fill words; the lowest bits first.

    Args:
        values: [..., n]. bits: of a number, of which a word holds a whole count. order: as for :func:`unpack_words`.
    """
    split = torch.unflatten(values.long(), -1, (-1, WORD // bits))
    places = torch.tensor(order or range(WORD // bits), device=values.device)
    words = (split << places * bits).sum(-1)
    return torch.where(words >= 1 << (WORD - 1), words - (1 << WORD), words).int()


def _per_word(words: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(WORD // bits, dtype=torch.int32, device=words.device) * bits
    values = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2)


def _stream(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers of a stream of bits; 64-bit pairs of neighbouring words hold every number whole."""
    count = words.shape[-1] * WORD // bits
    first = torch.arange(count, device=words.device) * bits
    wide = words.long() & 0xFFFFFFFF
    following = torch.cat((wide[..., 1:], torch.zeros_like(wide[..., :1])), dim=-1)
    low, high = wide[..., first // WORD], following[..., first // WORD]
    shift = first % WORD
    # The shift of the upper word stays below 32 where it matters: a number has at most 8 bits.
    joined = (low >> shift) | torch.where(shift > WORD - bits, high << (WORD - shift), 0)
    return (joined & ((1 << bits) - 1)).int()


def unpack_nibbles(stored: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Return [..., 2 n] numbers below 16 out of [..., n] bytes, as uint8, the low four bits first unless said."""
    low, high = stored & 15, stored >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def from_table(codes: torch.Tensor, table: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """Return float32 numbers that ``codes`` point to in a table."""
    numbers = torch.as_tensor(table, dtype=torch.float32, device=codes.device)
    return numbers[codes.long()]


def microscaled(packed: torch.Tensor, scales: torch.Tensor, block: int = 32) -> torch.Tensor:
    """Return float32 numbers [..., n] out of bytes [..., n / 2] of E2M1 pairs and exponents [..., n / block]."""
    return from_table(unpack_nibbles(packed), E2M1) * exponents(scales).repeat_interleave(block, -1)


def exponents(stored: torch.Tensor) -> torch.Tensor:
    """Return 2 to the power of E8M0 bytes less 127, as float32; 255 is NaN (OCP Microscaling 1.0)."""
    if stored.dtype != torch.uint8:
        return stored.float()
    value = torch.ldexp(torch.ones((), device=stored.device), stored.float() - E8M0_BIAS)
    return value.masked_fill(stored == E8M0_NAN, float("nan"))
