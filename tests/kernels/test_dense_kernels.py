"""Products of few rows against float64, and compilation for capability 9.0. Run as a program, without the interpreter,
this file writes one JSON object per compiled kernel.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_checks import BOUNDS, draw

from jackfield.interfaces import LayerInfo, OutputShard, Parallel, ParameterHolder, PendingNorm
from jackfield.layers.functional import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from jackfield_quantization.triton_dense_launch import padded_rows, skinny_product, splits_used, tiles_ahead
from jackfield_quantization.triton_dense_plan import GATES, SkinnyShape, foldable_ops, narrow_shape, skinny_shape
from jackfield_quantization.triton_dense_scheme import SkinnyScheme

PLAIN = SkinnyShape(4, 32, 1, 4, 1, matrix=False)
MATRIX = SkinnyShape(16, 32, 1, 4, 1, matrix=True)
SLICED = SkinnyShape(16, 64, 1, 4, 1, matrix=True, slices=4, registers=128)
AROUND = {"rms_norm", "fused_add_rms_norm", *GATES}
SHARED_LIMIT = 227 * 1024
"""Bytes that a program may have on capability 9.0."""
MODELS = [
    (6144, 4096),
    (24576, 4096),
    (4096, 4096),
    (4096, 12288),
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (4096, 2048),
    (960, 576),
    (3072, 576),
]


def product(
    rows: int, outputs: int, inputs: int, shape: SkinnyShape, dtype: torch.dtype, bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel finds and what float64 finds; the counters must be zero again."""
    x, weight = draw(rows, inputs, dtype=dtype, seed=1), draw(outputs, inputs, dtype=dtype, seed=2)
    added = draw(outputs, dtype=dtype, seed=3) * 10 if bias else None
    counters = torch.zeros(-(-outputs // shape.block_o), dtype=torch.int32)
    out = torch.full((rows, outputs), torch.nan, dtype=dtype)
    found = skinny_product(x, weight, added, out, shape, counters)
    assert found is out
    assert not counters.any()
    wanted = x.double() @ weight.double().t()
    return found, wanted if added is None else wanted + added.double()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", range(1, 17))
def test_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    for shape in (PLAIN, MATRIX, SLICED) if rows <= 4 else (MATRIX, SLICED):
        for splits in (1, 3):
            found, wanted = product(rows, 24, 160, replace(shape, splits=splits), dtype, bias=False)
            assert relative_error(found, wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (17, 100), (33, 129), (15, 31), (40, 224)])
@pytest.mark.parametrize("shape", [PLAIN, MATRIX, SLICED], ids=["plain", "matrix", "sliced"])
def test_odd_sizes_bias_and_empty_splits(shape: SkinnyShape, outputs: int, inputs: int, splits: int) -> None:
    found, wanted = product(3, outputs, inputs, replace(shape, splits=splits), torch.float32, bias=True)
    assert relative_error(found, wanted) < BOUNDS[torch.float32]


@pytest.mark.parametrize("shape", [PLAIN, MATRIX, SLICED], ids=["plain", "matrix", "sliced"])
def test_strided_rows_and_nothing_written_beside_them(shape: SkinnyShape) -> None:
    wide, weight, base = draw(3, 100, dtype=torch.float32), draw(10, 200, dtype=torch.float32), torch.zeros(4, 30)
    x, part = wide[:, 7:71], weight[:, 5:69]
    skinny_product(x, part, None, base[:3, 10:20], replace(shape, splits=2), torch.zeros(9, dtype=torch.int32))
    assert relative_error(base[:3, 10:20], x.double() @ part.double().t()) < BOUNDS[torch.float32]
    assert base.count_nonzero() == 30


def test_a_second_launch_with_the_same_counters() -> None:
    x, weight = draw(2, 96, dtype=torch.float32), draw(8, 96, dtype=torch.float32)
    counters, shape = torch.zeros(2, dtype=torch.int32), replace(PLAIN, splits=3)
    first, second = (skinny_product(x, weight, None, torch.empty(2, 8), shape, counters) for _ in range(2))
    assert torch.equal(first, second)


EPS = 1e-5
ACTIVATIONS = {"silu": silu_and_mul, "gelu": gelu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


def pending(rows: int, inputs: int, dtype: torch.dtype, residual: bool) -> PendingNorm:
    x, factor = draw(rows, inputs, dtype=dtype, seed=1), 1 + draw(inputs, dtype=dtype, seed=4) / 4
    if not residual:
        return PendingNorm(x, None, None, factor, EPS)
    other = draw(rows, inputs, dtype=dtype, seed=5)
    # Beside the rows to write are some to leave alone.
    return PendingNorm(x, other, x.new_full((rows + 8, inputs), torch.nan)[:rows], factor, EPS)


def normed(given: PendingNorm) -> torch.Tensor:
    """Return the norm in float64, of the rounded sum."""
    total = given.x if given.residual is None else given.x + given.residual
    wide = total.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + given.eps) * given.weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(
    ("rows", "shape"),
    [(1, PLAIN), (1, MATRIX), (5, MATRIX), (16, MATRIX), *((rows, SLICED) for rows in range(1, 10))],
    ids=str,
)
def test_a_norm_before_the_product(rows: int, shape: SkinnyShape, residual: bool, dtype: torch.dtype) -> None:
    for outputs, inputs in ((24, 160), (33, 129)):
        given = pending(rows, inputs, dtype, residual)
        weight, bias = draw(outputs, inputs, dtype=dtype, seed=2), draw(outputs, dtype=dtype, seed=3)
        out = torch.full((rows, outputs), torch.nan, dtype=dtype)
        skinny_product(given, weight, bias, out, shape, torch.zeros(9, dtype=torch.int32))
        wanted = normed(given) @ weight.double().t() + bias.double()
        assert relative_error(out, wanted) < BOUNDS[dtype]
        if given.residual is not None and given.total is not None:
            assert torch.equal(given.total, given.x + given.residual)
            assert given.total._base is not None and given.total._base[rows:].isnan().all()


@pytest.mark.parametrize("shape", [MATRIX, SLICED], ids=["matrix", "sliced"])
def test_weighted_rows_may_leave_the_range_of_float16_before_they_are_normal(shape: SkinnyShape) -> None:
    dtype = torch.float16
    x, factor = draw(3, 160, dtype=torch.float32, seed=1) * 8000, draw(160, dtype=torch.float32, seed=4) * 10
    assert float((x * factor).abs().max()) > 2 * torch.finfo(dtype).max
    small = torch.tensor([[1.0], [1e-3], [1e-6]])
    given = PendingNorm((x * small).to(dtype), None, None, factor.to(dtype), EPS)
    weight, out = draw(24, 160, dtype=dtype, seed=2) / 16, torch.full((3, 24), torch.nan, dtype=dtype)
    skinny_product(given, weight, None, out, shape, torch.zeros(9, dtype=torch.int32))
    for found, wanted in zip(out, normed(given) @ weight.double().t(), strict=True):
        assert relative_error(found, wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("rows", "shape"), [(1, PLAIN), (4, PLAIN), (7, MATRIX), (2, SLICED), (8, SLICED)], ids=str)
def test_a_gate_after_the_product(rows: int, shape: SkinnyShape, splits: int, kind: str) -> None:
    for half, inputs in ((12, 160), (33, 129), (1, 64)):
        x, weight = draw(rows, inputs, dtype=torch.float32), draw(2 * half, inputs, dtype=torch.float32, seed=2) / 8
        bias = draw(2 * half, dtype=torch.float32, seed=3)
        out, counters = torch.full((rows, half), torch.nan), torch.zeros(64, dtype=torch.int32)
        skinny_product(x, weight, bias, out, replace(shape, splits=splits), counters, gate=kind)
        wanted = ACTIVATIONS[kind](x.double() @ weight.double().t() + bias.double())
        assert relative_error(out, wanted) < BOUNDS[torch.float32]
        assert not counters.any()


@pytest.mark.parametrize(("rows", "shape"), [(1, PLAIN), (2, SLICED), (8, SLICED), (9, MATRIX)], ids=str)
def test_a_norm_and_a_gate_around_a_product_of_scaled_weights(rows: int, shape: SkinnyShape) -> None:
    given, scale = pending(rows, 96, torch.float32, residual=True), draw(20, dtype=torch.float32, seed=6).abs()
    weight, out = draw(20, 96, dtype=torch.float32, seed=2) / 8, torch.full((rows, 10), torch.nan)
    counters = torch.zeros(9, dtype=torch.int32)
    skinny_product(given, weight, None, out, shape, counters, scale_O=scale, gate="silu")
    wanted = silu_and_mul(normed(given) @ (weight * scale[:, None]).double().t())
    assert relative_error(out, wanted) < BOUNDS[torch.float32]


def test_what_can_be_folded() -> None:
    assert foldable_ops(1, None) == foldable_ops(1, replace(PLAIN, block_o=1)) == frozenset()
    assert foldable_ops(1, PLAIN) == foldable_ops(16, MATRIX) == foldable_ops(2, SLICED) == AROUND
    assert foldable_ops(2, PLAIN) == foldable_ops(1, replace(PLAIN, splits=2)) == set(GATES)


class Layer:
    """The least a layer can be."""

    info = LayerInfo("o", 512, (OutputShard("", 512),), Parallel.REPLICATED, dtype="float16")
    weight = draw(512, 512, dtype=torch.float16, seed=2)

    def get_parameter(self, target: str) -> torch.Tensor:
        assert target == "weight"
        return self.weight

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError


class WideLayer(Layer):
    """The same with more outputs than inputs."""

    info = LayerInfo(
        "up", 512, (OutputShard("gate", 264), OutputShard("up", 264)), Parallel.REPLICATED, dtype="float16"
    )
    weight = draw(528, 512, dtype=torch.float16, seed=2) / 8


class OnFewCores(SkinnyScheme):
    """The scheme as it is on a device."""

    def finalize(self, layer: ParameterHolder) -> None:
        self._cores = 4
        self._counters = torch.zeros(512, dtype=torch.int32)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_the_scheme_launches_the_kernel_for_few_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, scheme = Layer(), OnFewCores()
    scheme.finalize(layer)
    x, bias = draw(rows, 512, dtype=torch.float16), draw(512, dtype=torch.float16, seed=3)
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    monkeypatch.setattr(torch, "addmm", None)
    wanted = x.double() @ layer.weight.double().t() + bias.double()
    out = torch.full((rows, 512), torch.nan, dtype=torch.float16)
    assert scheme.apply(layer, x, bias, out) is out
    assert relative_error(out, wanted) < BOUNDS[torch.float16]
    assert torch.equal(scheme.apply(layer, x, bias), out)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_the_scheme_folds_what_it_says(rows: int) -> None:
    layer, scheme = Layer(), OnFewCores()
    assert scheme.folded_ops(layer.info, rows) == frozenset(), "where nothing is launched nothing is folded"
    scheme.finalize(layer)
    ops = scheme.folded_ops(layer.info, rows)
    assert ops >= set(GATES) if rows < 17 else not ops
    assert ("fused_add_rms_norm" in ops) == ("rms_norm" in ops) == (rows == 1)
    for op in sorted(ops & set(GATES)):
        given: Any = (
            pending(1, 512, torch.float16, residual=True) if rows == 1 else draw(rows, 512, dtype=torch.float16)
        )
        found = scheme.apply_folded(layer, given, None, op)
        plain = normed(given) if rows == 1 else given.double()
        assert relative_error(found, ACTIVATIONS[GATES[op]](plain @ layer.weight.double().t())) < BOUNDS[torch.float16]
    if rows == 1:
        given = pending(1, 512, torch.float16, residual=False)
        wanted = normed(given) @ layer.weight.double().t()
        assert relative_error(scheme.apply_folded(layer, given, None), wanted) < BOUNDS[torch.float16]


@pytest.mark.parametrize("rows", [2, 5, 8, 9])
def test_up_to_eight_rows_are_folded_around_a_wide_weight(rows: int) -> None:
    layer, scheme = WideLayer(), OnFewCores()
    scheme.finalize(layer)
    assert scheme.folded_ops(layer.info, rows) == (AROUND if rows <= 8 else frozenset())
    for given in (pending(rows, 512, torch.float16, residual=r) for r in (True, False)) if rows <= 8 else ():
        wanted = normed(given) @ layer.weight.double().t()
        assert relative_error(scheme.apply_folded(layer, given, None), wanted) < BOUNDS[torch.float16]
        found = scheme.apply_folded(layer, given, None, "silu_and_mul")
        assert relative_error(found, silu_and_mul(wanted)) < BOUNDS[torch.float16]
        if given.residual is not None and given.total is not None:
            assert torch.equal(given.total, given.x + given.residual)


@pytest.mark.parametrize(
    "x",
    [
        draw(17, 512, dtype=torch.float16),
        draw(2, 3, 512, dtype=torch.float16),
        draw(512, 2, dtype=torch.float16).t(),
        draw(0, 512, dtype=torch.float16),
    ],
    ids=["many rows", "three dimensions", "columns apart", "no rows"],
)
def test_the_scheme_leaves_the_rest_to_torch(x: torch.Tensor) -> None:
    layer, scheme = Layer(), OnFewCores()
    scheme.finalize(layer)
    assert torch.equal(scheme.apply(layer, x, None), torch.nn.functional.linear(x, layer.weight))


def test_padded_rows() -> None:
    assert [padded_rows(rows, PLAIN) for rows in (1, 2, 3, 4)] == [1, 2, 4, 4]
    assert [padded_rows(rows, MATRIX) for rows in (1, 8, 9, 16)] == [8, 8, 16, 16]


@pytest.mark.parametrize(
    ("inputs", "splits", "used", "ahead"),
    [(32, 1, 1, 1), (33, 1, 1, 2), (320, 1, 1, 2), (320, 3, 3, 2), (160, 4, 3, 1), (16, 7, 1, 1), (224, 2, 2, 2)],
)
def test_splits_without_a_tile_are_not_launched(inputs: int, splits: int, used: int, ahead: int) -> None:
    shape = replace(PLAIN, splits=splits)
    assert splits_used(inputs, shape) == used
    assert tiles_ahead(inputs, shape) == ahead
    assert tiles_ahead(inputs, replace(shape, stages=3)) == 1


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=False, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_chosen_launches_compile_and_fit_the_device(compiled: list[dict[str, Any]]) -> None:
    assert {row["kernel"] for row in compiled} == {"skinny_kernel"}
    assert len(compiled) == len({row["case"] for row in compiled}) > 2
    assert {(row["folded"], row["narrow"]) for row in compiled} == {(False, False), (True, False), (True, True)}
    assert [row for row in compiled if row["shared_bytes"] > SHARED_LIMIT or row["spilled_bytes"]] == []


def test_matrix_units_are_used_where_chosen(compiled: list[dict[str, Any]]) -> None:
    assert {row["matrix"] for row in compiled} == {True, False}
    assert all((row["wgmma"] or row["mma"]) == row["matrix"] for row in compiled)


def test_overlapped_products_read_weights_and_write_nothing_before_they_wait(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        expected = (1, 1) if row["pdl"] else (0, 0)
        assert (row["waits"], row["releases"]) == expected, row
        assert not row["pdl"] or (row["loads_before"] > 0 and row["stores_before"] == 0 and row["stores"] > 0), row
    assert {row["pdl"] for row in compiled} == {True, False}


def chosen() -> dict[tuple[SkinnyShape, int], tuple[int, int, int]]:
    """Return what is launched for well-known models on 132 multiprocessors, each kernel once, with its sizes."""
    found = {}
    for rows, (outputs, inputs) in itertools.product((1, 2, 3, 4, 8, 16), MODELS):
        shape = skinny_shape(rows, outputs, inputs, 132)
        if shape is not None:
            found[shape, padded_rows(rows, shape)] = (rows, outputs, inputs)
    return found


def folded(rows: int, shape: SkinnyShape, x: torch.Tensor) -> list[tuple[torch.Tensor | PendingNorm, str]]:
    """Return what can be folded into a launch: rows, perhaps before their norm, and gates."""
    ops = foldable_ops(rows, shape)
    normed = PendingNorm(x, x, torch.empty_like(x), x[0], EPS) if "fused_add_rms_norm" in ops else x
    return [(given, gate) for given, gate in ((normed, ""), (normed, "silu")) if gate or given is not x]


def main() -> None:
    """Compile everything: plain launches, those that do not overlap, folded ones, and folded ones of narrow weights."""
    import triton
    from ahead_of_time import Compiler

    compiler = Compiler(90)
    triton.runtime.JITFunction.run = lambda self, *args, **options: compiler(self, *args, **options)

    def launch(shape: SkinnyShape, sizes: tuple[int, int, int], fold: bool, pdl: bool, narrow: bool) -> None:
        rows, outputs, inputs = sizes
        x, out = (torch.empty(rows, size, dtype=torch.bfloat16) for size in (inputs, outputs))
        weight = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn if narrow else torch.bfloat16)
        scale, counters = torch.empty(outputs) if narrow else None, torch.zeros(outputs, dtype=torch.int32)
        for given, gate in folded(rows, shape, x) if fold else [(x, "")]:
            compiler.label = f"{shape} {padded_rows(rows, shape)} {pdl} {fold} {gate} {narrow}"
            kept = out[:, : outputs // 2] if gate else out
            skinny_product(given, weight, None, kept, shape, counters, pdl, scale, gate)
            compiler.rows[-1] |= {"matrix": shape.matrix, "folded": fold, "narrow": narrow}

    for (shape, _), sizes in chosen().items():
        for fold, pdl in ((False, True), (True, True), (False, False)):
            if pdl or sizes[0] in (1, 16):
                launch(shape, sizes, fold, pdl, narrow=False)
    found = {
        narrow_shape(rows, outputs, inputs, 132): (rows, outputs, inputs)
        for rows, (outputs, inputs) in itertools.product((1, 4, 8), MODELS)
    }
    for narrow, sizes in found.items():
        if narrow is not None:
            launch(narrow, sizes, True, True, narrow=True)
    sys.stdout.writelines(json.dumps(row) + "\n" for row in compiler.rows)


if __name__ == "__main__":
    main()
