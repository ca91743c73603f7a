"""Unpacking, number by number, against arithmetic on Python's own whole numbers and floats."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from bitsandbytes import functional
from quantized_writers import AWQ_PLACES, pack_bits

from jackfield_quantization.packing import (
    AWQ_ORDER,
    E2M1,
    E2M3,
    FP4,
    NF4,
    exponents,
    from_table,
    unpack_nibbles,
    unpack_words,
)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_words_are_a_stream_of_bits(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    numbers = torch.randint(0, 1 << bits, (5, 96), generator=generator)
    numbers[0], numbers[1] = (1 << bits) - 1, 0
    words = pack_bits(numbers, bits)
    assert torch.equal(unpack_words(words, bits), numbers.int())
    assert torch.equal(unpack_words(words.t().contiguous(), bits, 0), numbers.t().int())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_bit_of_a_word_matters(bits: int) -> None:
    for place in range(96):
        whole = 1 << place
        words = [(whole >> shift) & 0xFFFFFFFF for shift in (0, 32, 64)]
        signed = torch.tensor([[w - (1 << 32) if w >> 31 else w for w in words]], dtype=torch.int32)
        found = unpack_words(signed, bits)[0].tolist()
        assert found == [(whole >> (bits * i)) & ((1 << bits) - 1) for i in range(96 // bits)]


def test_columns_out_of_order() -> None:
    """AWQ: nibble ``p`` of a word holds column ``AWQ_PLACES[p]``."""
    word = sum(column << (4 * place) for place, column in enumerate(AWQ_PLACES))
    signed = torch.tensor([[word - (1 << 32) if word >> 31 else word]], dtype=torch.int32)
    assert unpack_words(signed, 4, order=AWQ_ORDER).tolist() == [list(range(8))]


def test_nibbles() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert unpack_nibbles(every).tolist() == [part for n in range(256) for part in (n % 16, n // 16)]
    assert unpack_nibbles(every, high_first=True).tolist() == [part for n in range(256) for part in (n // 16, n % 16)]


def float_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Return a small float by its definition; the bias is that of IEEE 754."""
    bias = (1 << (exponent_bits - 1)) - 1
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    part = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    return sign * (part * 2.0 ** (1 - bias) if exponent == 0 else (1 + part) * 2.0 ** (exponent - bias))


def test_four_and_six_bit_floats() -> None:
    assert list(E2M1) == [float_of(code, 2, 1) for code in range(16)]
    assert list(E2M3) == [float_of(code, 2, 3) for code in range(64)]
    assert from_table(torch.arange(16, dtype=torch.uint8), E2M1).tolist() == list(E2M1)


def test_exponents() -> None:
    found = exponents(torch.arange(256, dtype=torch.uint8)).tolist()
    assert found[:255] == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert math.isnan(found[255])
    same = exponents(torch.arange(1, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)).tolist()
    assert same == found[1:255]


def test_tables_of_bitsandbytes() -> None:
    for kind, table in (("nf4", NF4), ("fp4", FP4)):
        own = functional.get_4bit_type(kind, device="cpu")
        assert torch.equal(torch.tensor(sorted(table)), torch.tensor(sorted(own.tolist())))
        codes = torch.tensor(list(itertools.chain(range(16), range(16))), dtype=torch.uint8)
        stored = (codes[0::2] << 4 | codes[1::2]).unsqueeze(1)
        state = functional.QuantState(torch.ones(1), torch.Size([1, 32]), own, 64, kind, torch.float32)
        decoded = functional.dequantize_4bit(stored, state, quant_type=kind).flatten()
        torch.testing.assert_close(decoded, from_table(codes, table), rtol=0, atol=1e-7)
