"""Decoding bit for bit, and products against float64."""

from __future__ import annotations

import pytest
import torch
from native_world import block_values, bound, guarded, rounding_bound, stored, threads, untouched, values_of

from jackfield_native.library import TYPES
from jackfield_native.products import PACKED, Weight, decode_rows, integer_rows

WORDS = pytest.mark.parametrize("word", list(TYPES))
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 31, 32, 33)


def reference(x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ values.double().t()
    return product if bias is None else product + bias.double()


@WORDS
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 3), (70, 9)])
def test_decoded_values_are_those_of_the_format_bit_for_bit(word: str, rows: int, blocks: int) -> None:
    columns = blocks * block_values(word) * (1 if block_values(word) > 1 else 37)
    weight = stored(word, rows, columns)
    assert torch.equal(decode_rows(weight, word, columns), values_of(weight, word))


@WORDS
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("team", [1, 2])
def test_products_of_few_rows(word: str, rows: int, team: int) -> None:
    columns, outputs = 2304 if block_values(word) == 256 else 2080, 61
    weight = stored(word, outputs, columns)
    values, x, bias = values_of(weight, word), torch.randn(rows, columns), torch.randn(outputs)
    out, buffer = guarded(rows, outputs)
    with threads(team):
        Weight([(weight, word)], columns).few_rows(x, bias, out)
    assert untouched(buffer)
    assert ((out.double() - reference(x, values, bias)).abs() <= bound(x, values)).all()


@pytest.mark.parametrize("word", sorted(PACKED))
@pytest.mark.parametrize("rows", range(1, 6))
def test_products_of_integers(word: str, rows: int) -> None:
    columns, outputs = 2304 if block_values(word) == 256 else 2080, 61
    weight = stored(word, outputs, columns)
    values, x, bias = values_of(weight, word), torch.randn(rows, columns), torch.randn(outputs)
    x[0, :40] *= 1000  # a part of large numbers, and one of which eight are
    x[-1, 64:96] = 0
    made = Weight([(weight, word)], columns, integers=True)
    out, buffer = guarded(rows, outputs)
    for team in (1, 2):
        with threads(team):
            assert made.few_rows(x, bias, out) is out
        assert untouched(buffer)
        assert ((out.double() - reference(x, values, bias)).abs() <= rounding_bound(x, values)).all()
    alone = torch.cat([made.few_rows(row[None], bias, torch.empty(1, outputs)) for row in x])
    if rows <= integer_rows():
        assert torch.equal(out, alone), "a row is what it is alone"
    in_float = Weight([(weight, word)], columns).few_rows(x, bias, torch.empty(rows, outputs))
    assert torch.equal(out, in_float) == (rows > integer_rows())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_integers_do_not_hide_what_is_no_number(number: float) -> None:
    x = torch.ones(2, 64)
    x[1, 40] = number
    out = Weight([(stored("Q4_1", 4, 64), "Q4_1")], 64, integers=True).few_rows(x, None, torch.empty(2, 4))
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()


def test_numbers_too_small_to_be_rounded_are_zeros() -> None:
    weight = Weight([(stored("Q8_0", 4, 64), "Q8_0")], 64, integers=True)
    assert weight.few_rows(torch.full((1, 64), 1e-42), None, torch.empty(1, 4)).abs().max() <= 1e-30


@pytest.mark.parametrize("word", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("columns", [1, 3, 15, 16, 31, 32, 33, 65, 575])
@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 5, 9])
def test_odd_sizes_of_plain_types(word: str, columns: int, outputs: int) -> None:
    weight = stored(word, outputs, columns)
    values = values_of(weight, word)
    for rows in (1, 2, 7):
        x = torch.randn(rows, columns)
        out, buffer = guarded(rows, outputs)
        Weight([(weight, word)], columns).few_rows(x, None, out)
        assert untouched(buffer)
        assert ((out.double() - reference(x, values, None)).abs() <= bound(x, values)).all()


@WORDS
def test_a_row_does_not_depend_on_its_mates_nor_on_threads(word: str) -> None:
    columns = 4096
    weight, x = Weight([(stored(word, 130, columns), word)], columns), torch.randn(32, columns)
    alone = torch.cat([weight.few_rows(x[i : i + 1], None, torch.empty(1, 130)) for i in range(32)])
    for rows in (2, 5, 6, 7, 32):
        for team in (1, 2):
            with threads(team):
                assert torch.equal(weight.few_rows(x[:rows], None, torch.empty(rows, 130)), alone[:rows])


def test_strided_rows_of_activations_and_results() -> None:
    wide, weight = torch.randn(5, 300), stored("Q4_1", 40, 64)
    x, values = wide[:, 100:164], values_of(weight, "Q4_1")
    out, buffer = guarded(5, 90)
    Weight([(weight, "Q4_1")], 64).few_rows(x, None, out[:, 20:60])
    assert untouched(buffer)
    assert out[:, :20].isnan().all() and out[:, 60:].isnan().all()
    torch.testing.assert_close(out[:, 20:60], (x.double() @ values.double().t()).float())


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_parts_of_several_types_are_stacked(rows: int) -> None:
    words = {"Q8_0": 5, "F32": 3, "Q6_K": 7}
    parts = [(stored(word, count, 512), word) for word, count in words.items()]
    values, x, bias = torch.cat([values_of(*part) for part in parts]), torch.randn(rows, 512), torch.randn(15)
    weight = Weight(parts, 512)
    for product in (weight.few_rows, weight.many_rows):
        got = product(x, bias, torch.empty(rows, 15))
        assert ((got.double() - reference(x, values, bias)).abs() <= bound(x, values)).all()
    assert torch.equal(weight.decode(torch.float32), values)


def test_tiles_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield_native.products.DECODED_NUMBERS", 64 * 7)
    weight, x = stored("Q4_0", 30, 64), torch.randn(50, 64)
    got = Weight([(weight, "Q4_0")], 64).many_rows(x, None, torch.empty(50, 30))
    torch.testing.assert_close(got, x @ values_of(weight, "Q4_0").t())


def test_infinite_scales_and_activations_reach_the_result() -> None:
    weight = stored("Q8_0", 4, 32)
    weight[1, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # infinity in float16
    x = torch.ones(1, 32)
    out = Weight([(weight, "Q8_0")], 32).few_rows(x, None, torch.empty(1, 4))
    assert torch.equal(out.isfinite(), torch.tensor([[True, False, True, True]]))
