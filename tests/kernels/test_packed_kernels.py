"""Products with four-bit weights in Triton against products with the same weights expanded."""

from __future__ import annotations

import pytest
import torch
from quantized_writers import FORMATS
from stored_world import PATH, linear, named

from jackfield.interfaces import OutputShard
from jackfield_quantization.stored import Integers
from jackfield_quantization.triton_packed import (
    TritonAutoRound,
    TritonAwq,
    TritonCompressedTensors,
    TritonGptq,
)
from jackfield_quantization.triton_packed_launch import Packed, PackedShape, counters_needed, packed_product
from jackfield_quantization.triton_packed_scheme import as_bytes, in_order, unpacked

CASES = {
    "one row": (1, 40, 256, 128),
    "few rows": (7, 96, 384, 128),
    "a group is all columns": (3, 33, 256, 256),
    "groups of 64": (16, 40, 256, 64),
    "groups of 32": (5, 40, 256, 32),
    "groups of 16": (2, 40, 128, 16),
    "some rows": (50, 70, 256, 128),
    "many rows": (150, 140, 256, 64),
}


def random_matrix(outputs: int, inputs: int, group: int, seed: int = 0) -> Integers:
    """Return numbers of four bits less a zero point of each group."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(inputs) // group
    numbers = torch.randint(0, 16, (outputs, inputs), generator=generator)
    zeros = torch.randint(0, 16, (outputs, inputs // group), generator=generator)
    scales = torch.rand(outputs, inputs // group, generator=generator).half().float()
    return Integers(numbers - zeros[:, groups], scales, groups)


def packed_of(matrix: Integers) -> Packed:
    found = in_order(matrix)
    assert found is not None
    made = as_bytes(*found[:3])
    assert made is not None
    return Packed(*made, found[2])


def wide(matrix: Integers, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (matrix.values.float() * matrix.scales[:, matrix.groups]).to(dtype).double()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_expanded_product(case: str) -> None:
    rows, outputs, inputs, group = CASES[case]
    matrix = random_matrix(outputs, inputs, group)
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    counters = torch.zeros(counters_needed(outputs), dtype=torch.int32)
    for given in (None, bias):
        out = torch.full((rows, outputs), float("nan"))
        packed_product(x, packed_of(matrix), given, out, 4, counters)
        wanted = x.double() @ wide(matrix).t()
        assert error(out, wanted if given is None else wanted + bias.double()) < 1e-6
    assert not counters.any()


@pytest.mark.parametrize("splits", [2, 3])
def test_parts_come_together(splits: int) -> None:
    matrix = random_matrix(40, 512, 128)
    x, counters = torch.randn(4, 512, dtype=torch.float16), torch.zeros(2, dtype=torch.int32)
    for _ in range(2):
        out = torch.full((4, 40), float("nan"), dtype=torch.float16)
        packed_product(x, packed_of(matrix), None, out, 4, counters, PackedShape(32, 16, 1, 4, 2), splits)
        assert error(out, x.double() @ wide(matrix, torch.float16).t()) < 1e-3
        assert not counters.any()


METHODS = {
    "gptq-4": TritonGptq,
    "gptq-4-wide": TritonGptq,
    "gptq-4-whole": TritonGptq,
    "gptq-4-order": TritonGptq,
    "gptq-8": TritonGptq,
    "awq": TritonAwq,
    "ct-w4-group": TritonCompressedTensors,
    "ct-w4-asymmetric": TritonCompressedTensors,
    "ct-w8-group": TritonCompressedTensors,
    "auto-round": TritonAutoRound,
}
SHARDS = (OutputShard("q_proj", 64), OutputShard("k_proj", 32))


@pytest.mark.parametrize("name", METHODS)
def test_checkpoints_mean_what_they_say(name: str) -> None:
    kind, tensors, meanings = FORMATS[name], {}, []
    for seed, shard in enumerate(SHARDS):
        weight = torch.randn(shard.size, 128, generator=torch.Generator().manual_seed(seed)) * (seed + 1)
        stored, meaning = kind.write(weight)
        tensors |= named(f"{PATH}.{shard.name}", stored)
        meanings.append(meaning)
    layer = linear(METHODS[name], kind.config, tensors, 128, SHARDS)
    wanted = torch.cat(meanings)
    kept = {parameter.dtype for parameter in layer.parameters() if parameter.dim() == 2}
    # Eight bits do not fit, nor do two matrices whose inputs are in different orders.
    assert (torch.uint8 in kept) == (name not in ("gptq-8", "ct-w8-group"))
    torch.testing.assert_close(layer.scheme.dequantize(layer), wanted, rtol=1e-6, atol=1e-7)
    for shape in ((5, 128), (2, 3, 128)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(9))
        torch.testing.assert_close(layer(x), x @ wanted.t(), rtol=1e-5, atol=1e-4)


def test_bytes_hold_every_number() -> None:
    matrix = random_matrix(9, 256, 32)
    packed = packed_of(matrix)
    numbers = unpacked(packed.numbers).int() - packed.zeros.int()[:, matrix.groups]
    assert torch.equal(numbers, matrix.values.int())


def test_inputs_out_of_order_are_put_beside_one_another() -> None:
    matrix = random_matrix(9, 256, 32)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2))
    shuffled = Integers(matrix.values[:, order], matrix.scales, matrix.groups[order])
    found = in_order(shuffled)
    assert found is not None and found[2] == 32
    values, scales, _, back = found
    again = values.float() * scales[:, torch.arange(256) // 32]
    assert torch.equal(again, wide(shuffled).float()[:, back])


def test_what_does_not_fit_is_left_alone() -> None:
    matrix = random_matrix(9, 256, 32)
    assert as_bytes(matrix.values * 3, matrix.scales, 32) is None
    assert as_bytes(matrix.values[:, :192], matrix.scales[:, :6], 32) is None
    uneven = Integers(matrix.values, matrix.scales, torch.cat((torch.zeros(64, dtype=torch.int64), matrix.groups[64:])))
    assert in_order(uneven) is None
