"""Products of few rows on the device, through the scheme, against float64; recorded and replayed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from op_checks import BOUNDS, draw
from recording import record

from jackfield.interfaces import LayerInfo, OutputShard, Parallel, PendingNorm
from jackfield.layers.functional import settled, silu_and_mul
from jackfield_platforms.cuda_device import CudaGraphs
from jackfield_quantization.fp8_scheme import Fp8Scheme
from jackfield_quantization.triton_dense_launch import skinny_product
from jackfield_quantization.triton_dense_plan import AROUND, BEHIND, SkinnyShape, skinny_shape
from jackfield_quantization.triton_dense_scheme import SkinnyScheme

pytestmark = pytest.mark.gpu

SIZES = [(6144, 4096), (4096, 12288), (4096, 1024), (1024, 2048), (1000, 2064)]
WIDE = [(960, 576), (3072, 576), (6144, 1024), (4096, 2048), (1024, 560)]
"""Further ones of more outputs than inputs."""


class Layer:
    """The least a layer can be, finalized."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.info = LayerInfo("o", inputs, (OutputShard("", outputs),), Parallel.REPLICATED, dtype="bfloat16")
        self.weight = draw(outputs, inputs, dtype=dtype, device="cuda", seed=2)
        self.scheme = SkinnyScheme()
        self.scheme.finalize(self)

    def get_parameter(self, target: str) -> torch.Tensor:
        assert target == "weight"
        return self.weight

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scheme's product."""
        return self.scheme.apply(self, x, bias, out)


class Narrow:
    """The same, converted to 8-bit floats."""

    def __init__(self, outputs: int, inputs: int) -> None:
        self.info = LayerInfo("o", inputs, (OutputShard("", outputs),), Parallel.REPLICATED, dtype="bfloat16")
        self.parameters = {"weight": draw(outputs, inputs, dtype=torch.bfloat16, device="cuda", seed=2) / 8}
        self.scheme = Fp8Scheme()
        self.scheme.finalize(self)

    def get_parameter(self, target: str) -> torch.Tensor:
        return self.parameters[target]

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = dict(parameters)


def cores() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_against_float64(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    layer, bias = Layer(outputs, inputs, dtype), draw(outputs, dtype=dtype, device="cuda", seed=3) * 10
    for rows in range(1, 18):
        x = draw(rows, inputs, dtype=dtype, device="cuda", seed=rows)
        wanted = x.double() @ layer.weight.double().t()
        assert relative_error(layer.apply(x), wanted) < BOUNDS[dtype]
        out = torch.full((rows, outputs), torch.nan, dtype=dtype, device="cuda")
        assert layer.apply(x, bias, out) is out
        assert relative_error(out, wanted + bias.double()) < BOUNDS[dtype]


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (37, 129), (300, 1000)])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_odd_sizes(outputs: int, inputs: int, splits: int) -> None:
    shapes = [SkinnyShape(o, i, splits, 4, s, False) for o, i, s in ((4, 128, 1), (16, 512, 3))]
    shapes.append(SkinnyShape(32, 256, splits, 4, 3, True, slices=4))
    shapes += [SkinnyShape(o, i, splits, 4, s, True) for o, i, s in ((16, 64, 1), (64, 128, 4))]
    weight = draw(outputs, inputs, dtype=torch.bfloat16, device="cuda")
    counters = torch.zeros(outputs, dtype=torch.int32, device="cuda")
    for shape, rows in itertools.product(shapes, (1, 2, 3, 4, 7, 16)):
        if shape.matrix or rows <= 4:
            x = draw(rows, inputs, dtype=torch.bfloat16, device="cuda", seed=rows)
            found = skinny_product(x, weight, None, x.new_full((rows, outputs), torch.nan), shape, counters)
            assert relative_error(found, x.double() @ weight.double().t()) < BOUNDS[torch.bfloat16]
    assert not counters.any()


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1024, 3072)])
def test_a_recorded_product_gives_the_same_on_every_replay(outputs: int, inputs: int, rows: int) -> None:
    layer = Layer(outputs, inputs)
    x = draw(rows, inputs, dtype=torch.bfloat16, device="cuda")
    wanted, out = layer.apply(x), torch.full((rows, outputs), torch.nan, dtype=torch.bfloat16, device="cuda")
    graphs = CudaGraphs()
    graph = record(graphs, lambda: [layer.apply(x, None, out) for _ in range(3)])
    for _ in range(100):
        out.fill_(torch.nan)
        graphs.replay(graph)
        assert torch.equal(out, wanted)
    x.neg_()
    graphs.replay(graph)
    assert torch.equal(out, -wanted)


def test_splits_that_arrive_in_any_order_add_up_to_the_same() -> None:
    shape = skinny_shape(16, 4096, 4096, cores())
    assert shape is not None
    assert shape.splits > 1
    weight, x = (draw(rows, 4096, dtype=torch.bfloat16, device="cuda", seed=rows) for rows in (4096, 16))
    counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
    results = [skinny_product(x, weight, None, x.new_empty(16, 4096), shape, counters) for _ in range(50)]
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [*SIZES, *WIDE, (24576, 4096)])
def test_norms_and_gates_that_are_folded(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    layer, factor = Layer(outputs, inputs, dtype), 1 + draw(inputs, dtype=dtype, device="cuda", seed=4) / 4
    seen = set()
    for rows in range(1, 17):
        ops = layer.scheme.folded_ops(layer.info, rows)
        # Small enough for the product of two sums in float16.
        x, other = (draw(rows, inputs, dtype=dtype, device="cuda", seed=rows + n) / 16 for n in (0, 40))
        plain = x.double()
        given: torch.Tensor | PendingNorm = x
        if "fused_add_rms_norm" in ops:
            given = PendingNorm(x, other, torch.full_like(x, torch.nan), factor / 16, 1e-6)
            wide = (x + other).double()
            plain = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (factor / 16).double()
            assert relative_error(settled(given), plain) < BOUNDS[dtype]
        for gate in sorted(ops & {"silu_and_mul"}):
            product = plain @ layer.weight.double().t()
            found = layer.scheme.apply_folded(layer, given, None, gate)
            assert relative_error(found, silu_and_mul(product)) < 2 * BOUNDS[dtype], rows
            if isinstance(given, PendingNorm):
                assert given.total is not None and torch.equal(given.total, x + other)
                assert relative_error(layer.scheme.apply_folded(layer, given, None), product) < BOUNDS[dtype]
        if outputs > inputs and rows <= 8:
            assert ops == AROUND, rows
        seen |= ops
    assert len(seen) == 5


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 1024), (960, 576), (4096, 2048), (1024, 2048)])
def test_norms_and_gates_that_are_folded_around_8_bit_weights(outputs: int, inputs: int) -> None:
    layer = Narrow(outputs, inputs)
    weight = layer.scheme.dequantize_as(layer, torch.float64)
    factor = 1 + draw(inputs, dtype=torch.bfloat16, device="cuda", seed=4) / 4
    for rows in range(1, 9):
        ops = layer.scheme.folded_ops(layer.info, rows)
        assert layer.scheme.activation_spec(layer.info, rows) is None
        assert ops >= BEHIND and (ops == AROUND or outputs <= inputs), rows
        x, other = (draw(rows, inputs, dtype=torch.bfloat16, device="cuda", seed=rows + n) / 16 for n in (0, 40))
        given = PendingNorm(x, other, torch.full_like(x, torch.nan), factor / 16, 1e-6) if ops == AROUND else x
        product = settled(given).double() @ weight.t()
        found = layer.scheme.apply_folded(layer, given, None, "silu_and_mul")
        assert relative_error(found, silu_and_mul(product)) < 2 * BOUNDS[torch.bfloat16], rows
        if isinstance(given, PendingNorm):
            assert given.total is not None and torch.equal(given.total, x + other)
            assert relative_error(layer.scheme.apply_folded(layer, given, None), product) < 2 * BOUNDS[torch.bfloat16]
    assert layer.scheme.folded_ops(layer.info, 9) == frozenset()
    assert layer.scheme.activation_spec(layer.info, 9) is not None


@pytest.mark.parametrize("rows", [2, 5, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 1024), (960, 576), (6144, 4096)])
def test_a_recorded_folded_product_gives_the_same_on_every_replay(outputs: int, inputs: int, rows: int) -> None:
    layer, graphs = Layer(outputs, inputs), CudaGraphs()
    x, other = (draw(rows, inputs, dtype=torch.bfloat16, device="cuda", seed=n) for n in (1, 5))
    given = PendingNorm(x, other, torch.empty_like(x), x[0].clone(), 1e-6)
    wanted = layer.scheme.apply_folded(layer, given, None, "silu_and_mul")
    found: list[torch.Tensor] = []
    graph = record(graphs, lambda: found.append(layer.scheme.apply_folded(layer, given, None, "silu_and_mul")))
    for _ in range(50):
        found[0].fill_(torch.nan)
        graphs.replay(graph)
        assert torch.equal(found[0], wanted)
