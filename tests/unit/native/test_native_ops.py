"""Every op in C against the torch reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_world import guarded, threads, untouched

from jackfield.interfaces import OPS, Band, OpRequest, Settings
from jackfield.layers.functional import REFERENCES
from jackfield_native.library import kernels
from jackfield_ops.native_calls import CALLS
from jackfield_ops.native_ops import NativeOps

TEAMS = pytest.mark.parametrize("team", [1, 2])
WIDTHS = (1, 3, 15, 16, 17, 31, 64, 576, 577, 1536)


def close(got: torch.Tensor, want: torch.Tensor, size: float = 4e-6) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want.double(), rtol=size, atol=size)


@TEAMS
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
def test_norms(rows: int, width: int, team: int) -> None:
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    with threads(team):
        close(CALLS["rms_norm"](x, weight, 1e-5), REFERENCES["rms_norm"](x.double(), weight.double(), 1e-5))
        pair = CALLS["fused_add_rms_norm"](x, residual, weight, 1e-5)
    wanted = REFERENCES["fused_add_rms_norm"](x.double(), residual.double(), weight.double(), 1e-5)
    for got, want in zip(pair, wanted, strict=True):
        close(got, want)


def test_norms_of_strided_views_leave_their_input_alone() -> None:
    wide, weight = torch.randn(6, 7 * 20), torch.randn(20)
    before = wide.clone()
    heads = wide[:, 20:100].view(6, 4, 20)
    close(CALLS["rms_norm"](heads, weight, 1e-6), REFERENCES["rms_norm"](heads.double(), weight.double(), 1e-6))
    column = wide.t()[:20].t()
    close(CALLS["rms_norm"](column, weight, 1e-6), REFERENCES["rms_norm"](column.double(), weight.double(), 1e-6))
    assert torch.equal(wide, before)


@TEAMS
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("width", [*WIDTHS, 2500])
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_gated_activations(op: str, rows: int, width: int, team: int) -> None:
    x = torch.randn(rows, 2 * width) * 4
    with threads(team):
        close(CALLS[op](x), REFERENCES[op](x.double()))


@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_large_gates(op: str) -> None:
    gates = torch.tensor([[-1e30, -1000.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1000.0, 1e30]])
    x = torch.cat((gates, torch.ones(1, 9)), dim=1)
    close(CALLS[op](x), REFERENCES[op](x.double()))


@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_nan_stays_nan(op: str) -> None:
    x = torch.zeros(1, 40)
    x[0, 3], x[0, 19] = torch.nan, torch.nan
    assert CALLS[op](x).isnan().nonzero()[:, 1].tolist() == [3, 19]


@TEAMS
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (64, 32), (80, 80), (20, 6), (2, 2)])
def test_rotary_in_place(size: int, rotated: int, team: int) -> None:
    row, angles = torch.randn(40, 7 * size), torch.randn(40, rotated // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    heads, before = row[:, : 5 * size].view(40, 5, size), row.clone()
    want = REFERENCES["rotary"](heads.double(), cos_sin.double())
    with threads(team):
        assert CALLS["rotary"](heads, cos_sin) is heads
    close(heads, want)
    assert torch.equal(row[:, 5 * size :], before[:, 5 * size :])


def test_nothing_is_written_outside() -> None:
    for width in (1, 17, 33):
        x, weight = torch.randn(3, 2 * width), torch.randn(width)
        out, buffer = guarded(3, width)
        call: Any = kernels()
        call.jf_gated(0, x.data_ptr(), out.data_ptr(), 3, x.stride(0), width, 1)
        assert untouched(buffer) and out.isfinite().all()
        call.jf_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), 3, 1, x.stride(0), 0, width, 1e-5, 1)
        assert untouched(buffer)


def test_declaration() -> None:
    assert NativeOps.kinds == OPS.keys() == CALLS.keys()
    assert NativeOps.dtypes == {"float32"}
    assert NativeOps.device_types == {"cpu"}
    request = OpRequest(kind="rms_norm")
    assert not NativeOps.check(request)
    preference = NativeOps.preference(request)
    assert (preference.band, preference.why) == (Band.GOOD, "one call for an op, where torch takes several passes")
    assert NativeOps.build("rms_norm", request, Settings()) is CALLS["rms_norm"]
