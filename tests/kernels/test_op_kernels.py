"""Every Triton op against its torch reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from op_checks import draw, near, norm_views, same_rotation

from jackfield.interfaces import OPS, QUANTIZING_OPS, DeviceFacts, OpRequest, QuantizedActivation
from jackfield.interfaces.plugin import Settings
from jackfield.layers.functional import REFERENCES
from jackfield_ops.triton_launch import row_tile
from jackfield_ops.triton_ops import TritonOps

# The interpreter computes with numpy, which warns where a device would not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
BUILT = {op: TritonOps.build(op, OpRequest(kind=op), Settings()) for op in (*OPS, *QUANTIZING_OPS)}


@DTYPES
@pytest.mark.parametrize("name", norm_views(torch.float32, "cpu"))
def test_rms_norm(name: str, dtype: torch.dtype) -> None:
    x = norm_views(dtype, "cpu")[name]
    weight = draw(x.shape[-1], dtype=dtype, seed=2)
    assert near(BUILT["rms_norm"](x, weight, 1e-6), REFERENCES["rms_norm"](x, weight, 1e-6))


@DTYPES
@pytest.mark.parametrize("name", ["matrix", "rows of a wider matrix", "four dimensions", "one row"])
def test_fused_add_rms_norm(name: str, dtype: torch.dtype) -> None:
    x = norm_views(dtype, "cpu")[name]
    residual, weight = draw(*x.shape, dtype=dtype, seed=3), draw(x.shape[-1], dtype=dtype, seed=2)
    before = residual.clone()
    normal, total = BUILT["fused_add_rms_norm"](x, residual, weight, 1e-6)
    wanted, wanted_total = REFERENCES["fused_add_rms_norm"](x, residual, weight, 1e-6)
    assert near(normal, wanted)
    assert torch.equal(total, wanted_total)
    assert torch.equal(residual, before)


@DTYPES
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("width", [1, 40, 1500])
def test_gated_activations(op: str, dtype: torch.dtype, width: int) -> None:
    x = draw(6, 2 * width, dtype=dtype) * 4
    assert near(BUILT[op](x), REFERENCES[op](x))
    rows = torch.cat((x, x), 1)[:, : 2 * width]
    assert near(BUILT[op](rows), REFERENCES[op](x))
    assert near(BUILT[op](x.view(2, 3, -1)), REFERENCES[op](x).view(2, 3, -1))


@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations_of_large_values(op: str) -> None:
    x = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(BUILT[op](x), REFERENCES[op](x))


def same_rows(found: QuantizedActivation, wanted: QuantizedActivation) -> bool:
    """Return whether two quantizations are one but for steps of the type, where a number lies between two neighbours.
    The interpreter loses the carry where rounding ends at a power of two, and cuts off where numbers are smaller than
    the normal ones; a device does neither, which is tested there.
    """
    torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-5, atol=0)
    ours, theirs = found.values.float(), wanted.values.float()
    carried = (wanted.values.view(torch.uint8) & 7) == 0
    apart = (ours - theirs).abs()[~carried]
    steps = (theirs.abs() / 8).clamp_min(2.0**-8)[~carried]
    normal = theirs.abs()[~carried] >= 2.0**-6
    return bool((apart <= steps).all()) and float((apart[normal] > 0).float().mean()) < 0.005


@DTYPES
@pytest.mark.parametrize("name", ["matrix", "rows of a wider matrix", "one row"])
def test_norms_that_quantize(name: str, dtype: torch.dtype) -> None:
    x = norm_views(dtype, "cpu")[name]
    residual, weight = draw(*x.shape, dtype=dtype, seed=3), draw(x.shape[-1], dtype=dtype, seed=2)
    arguments = (x, weight, 1e-6)
    assert same_rows(BUILT["rms_norm_quant"](*arguments), REFERENCES["rms_norm_quant"](*arguments))
    found, total = BUILT["fused_add_rms_norm_quant"](x, residual, weight, 1e-6)
    wanted, wanted_total = REFERENCES["fused_add_rms_norm_quant"](x, residual, weight, 1e-6)
    assert same_rows(found, wanted) and torch.equal(total, wanted_total)


@DTYPES
@pytest.mark.parametrize("op", ["silu_and_mul_quant", "gelu_and_mul_quant", "gelu_tanh_and_mul_quant"])
@pytest.mark.parametrize("width", [16, 40, 1500])
def test_gated_activations_that_quantize(op: str, dtype: torch.dtype, width: int) -> None:
    x = draw(6, 2 * width, dtype=dtype)
    assert same_rows(BUILT[op](x), REFERENCES[op](x))
    rows = torch.cat((x, x), 1)[:, : 2 * width]
    assert same_rows(BUILT[op](rows), REFERENCES[op](x))


@DTYPES
@pytest.mark.parametrize(
    ("heads", "size", "turned"), [(1, 32, 32), (5, 64, 64), (11, 80, 80), (3, 64, 16), (2, 24, 12)]
)
def test_rotary(heads: int, size: int, turned: int, dtype: torch.dtype) -> None:
    x = draw(4, heads + 2, size, dtype=dtype)
    assert same_rotation(BUILT["rotary"], REFERENCES["rotary"], x, turned, slice(1, heads + 1))


@pytest.mark.parametrize("op", OPS)
def test_nothing_in_nothing_out(op: str) -> None:
    weight = torch.ones(8)
    arguments = {"rms_norm": (weight, 1e-6), "fused_add_rms_norm": (torch.zeros(0, 8), weight, 1e-6)}
    calls = {"rotary": partial(BUILT[op], torch.zeros(0, 2, 8), torch.zeros(0, 8))}
    found = calls.get(op, partial(BUILT[op], torch.zeros(0, 8), *arguments.get(op, ())))()
    first = found[0] if isinstance(found, tuple) else found
    assert len(first) == 0


def test_few_rows_are_spread_and_many_are_joined() -> None:
    assert row_tile(1, 4096) == (4096, 1, 8)
    assert row_tile(64, 128) == (128, 1, 1)
    assert row_tile(65536, 128) == (128, 32, 8)
    assert row_tile(4, 20000) == (32768, 1, 16)


def test_old_devices_are_rejected_with_the_reason() -> None:
    old = OpRequest(kind="rotary", device=DeviceFacts("cuda", capability=(7, 5)))
    new = OpRequest(kind="rotary", device=DeviceFacts("cuda", capability=(8, 0)))
    assert [(r.code, r.fact, r.detail) for r in TritonOps.check(old)] == [
        ("capability", "device.capability", "7.5 is below 8.0")
    ]
    assert not TritonOps.check(new)
