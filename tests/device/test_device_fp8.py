"""8-bit floats on the device: rounding, products of few and of many rows, recordings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from op_checks import draw
from recording import record

from jackfield.interfaces import QUANTIZING_OPS, DeviceFacts, LayerInfo, OpRequest, OutputShard, Parallel
from jackfield.interfaces.plugin import Settings
from jackfield.layers.functional import REFERENCES, quantize_rows
from jackfield_ops.triton_ops import TritonOps
from jackfield_platforms.cuda_device import CudaGraphs
from jackfield_quantization.fp8_kernels import quantize_tokens
from jackfield_quantization.fp8_scheme import Fp8Scheme

pytestmark = pytest.mark.gpu
DEVICE = DeviceFacts("cuda", capability=(9, 0))
BUILT = {op: TritonOps.build(op, OpRequest(kind=op, device=DEVICE), Settings()) for op in QUANTIZING_OPS}
SIZES = [(6144, 4096), (4096, 12288), (1024, 2048), (1008, 2064)]


class Layer:
    """The least a layer can be, finalized."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> None:
        name = str(dtype).removeprefix("torch.")
        self.info = LayerInfo("o", inputs, (OutputShard("", outputs),), Parallel.REPLICATED, dtype=name)
        self.parameters = {"weight": draw(outputs, inputs, dtype=dtype, device="cuda", seed=2)}
        self.scheme = Fp8Scheme()
        self.scheme.finalize(self)

    def get_parameter(self, target: str) -> torch.Tensor:
        return self.parameters[target]

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = dict(parameters)

    def wanted(self, x: torch.Tensor, *, quantized: bool) -> torch.Tensor:
        """Return the product in float64, of rows as they are or as they are quantized."""
        weight = self.parameters["weight"].double() * self.parameters["weight_scale"].double().unsqueeze(-1)
        if not quantized:
            return x.double() @ weight.t()
        rows = quantize_rows(x)
        values, scales = rows.values, rows.scales
        return (values.double() * scales.double().unsqueeze(-1)) @ weight.t()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 16), (37, 100), (300, 4096), (20, 12288)])
def test_rows_are_rounded_as_torch_does(rows: int, inputs: int, dtype: torch.dtype) -> None:
    x = draw(rows, inputs, dtype=dtype, device="cuda", seed=1)
    x *= torch.logspace(-3, 2, rows, device="cuda", dtype=dtype).unsqueeze(-1)
    found, wanted = quantize_tokens(x), quantize_rows(x)
    values, scales = wanted.values, wanted.scales
    torch.testing.assert_close(found.scales, scales, rtol=1e-6, atol=0)
    same = found.values.view(torch.uint8) == values.view(torch.uint8)
    # A number between two neighbours may go either way where the scale differs in its last bit.
    assert float(same.float().mean()) > 0.998
    step = (found.values.float() - values.float()).abs()
    assert bool((step <= values.float().abs().clamp_min(2.0**-6) * 0.1251).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_against_float64(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    layer = Layer(outputs, inputs, dtype)
    bias = draw(outputs, dtype=dtype, device="cuda", seed=3) * 10
    for rows in (1, 2, 3, 5, 16, 17, 64, 300):
        x = draw(rows, inputs, dtype=dtype, device="cuda", seed=100 + rows)
        found = layer.scheme.apply(layer, x, None)
        exact, rounded = (error(found, layer.wanted(x, quantized=quantized)) for quantized in (False, True))
        # Which of the two ways was taken is the scheme's choice; fast sums of 8-bit products lose some bits.
        assert found.dtype == dtype and min(exact, rounded) < 8e-3, (rows, exact, rounded)
        assert exact < 0.05
        out = torch.empty_like(found)
        assert layer.scheme.apply(layer, x, bias, out) is out
        assert min(error(out, layer.wanted(x, quantized=q) + bias.double()) for q in (False, True)) < 8e-3


def test_recorded_products_follow_their_input() -> None:
    layer = Layer(4096, 4096)
    for rows in (1, 8, 64):
        x = draw(rows, 4096, dtype=torch.bfloat16, device="cuda", seed=1)
        out = x.new_empty(rows, 4096)
        layer.scheme.apply(layer, x, None, out)
        graph = record(CudaGraphs(), partial(layer.scheme.apply, layer, x, None, out))
        for seed in (2, 3):
            x.copy_(draw(rows, 4096, dtype=torch.bfloat16, device="cuda", seed=seed))
            CudaGraphs().replay(graph)
            assert torch.equal(out, layer.scheme.apply(layer, x, None))


@pytest.mark.parametrize("op", ["rms_norm_quant", "fused_add_rms_norm_quant", "silu_and_mul_quant"])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 576), (33, 4096), (3, 12288)])
def test_quantizing_ops_round_as_torch_does(op: str, rows: int, width: int) -> None:
    x = draw(rows, 2 * width if "silu" in op else width, dtype=torch.bfloat16, device="cuda", seed=1)
    weight = draw(width, dtype=torch.bfloat16, device="cuda", seed=2)
    residual = draw(rows, width, dtype=torch.bfloat16, device="cuda", seed=3)
    arguments = {"rms_norm_quant": (weight, 1e-6), "fused_add_rms_norm_quant": (residual, weight, 1e-6)}.get(op, ())
    found, wanted = (ops(x, *arguments) for ops in (BUILT[op], REFERENCES[op]))
    if isinstance(found, tuple):
        assert torch.equal(found[1], wanted[1])
        found, wanted = found[0], wanted[0]
    # Numbers that are rounded to bfloat16 first may differ in their last bit, and so may what comes of them.
    torch.testing.assert_close(found.scales, wanted.scales, rtol=0.01, atol=0)
    back, expected = (made.values.float() * made.scales.unsqueeze(-1) for made in (found, wanted))
    assert float((found.values.view(torch.uint8) == wanted.values.view(torch.uint8)).float().mean()) > 0.97
    assert float((back - expected).norm() / expected.norm()) < 0.01
