"""Layer ops and cache moves on the device against the torch references there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from op_checks import angles_of, draw, near, norm_views, same_rotation
from paged_case import Shape, make_case

from jackfield.interfaces import OpRequest
from jackfield.interfaces.plugin import Settings
from jackfield.layers.functional import REFERENCES, rms_norm, rotary
from jackfield_attention.triton_backend import TritonBackend
from jackfield_ops.triton_ops import TritonOps

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
BUILT = {op: TritonOps.build(op, OpRequest(kind=op), Settings()) for op in REFERENCES}


@DTYPES
@pytest.mark.parametrize("name", norm_views(torch.float32, "cpu"))
def test_rms_norm(name: str, dtype: torch.dtype) -> None:
    x = norm_views(dtype, "cuda")[name]
    weight = draw(x.shape[-1], dtype=dtype, device="cuda", seed=2)
    assert near(BUILT["rms_norm"](x, weight, 1e-6), REFERENCES["rms_norm"](x, weight, 1e-6))


@DTYPES
@pytest.mark.parametrize("rows", [1, 65, 2048])
@pytest.mark.parametrize("width", [1024, 4096, 5120])
def test_fused_add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = (draw(rows, width, dtype=dtype, device="cuda", seed=seed) for seed in (3, 4))
    weight = draw(width, dtype=dtype, device="cuda", seed=2)
    normal, total = BUILT["fused_add_rms_norm"](x, residual, weight, 1e-6)
    wanted, wanted_total = REFERENCES["fused_add_rms_norm"](x, residual, weight, 1e-6)
    assert near(normal, wanted)
    assert torch.equal(total, wanted_total)


@DTYPES
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize(("rows", "width"), [(1, 12288), (300, 3072), (7, 1500)])
def test_gated_activations(op: str, rows: int, width: int, dtype: torch.dtype) -> None:
    x = draw(rows, 2 * width, dtype=dtype, device="cuda") * 3
    assert near(BUILT[op](x), REFERENCES[op](x))


@DTYPES
@pytest.mark.parametrize(("size", "turned"), [(128, 128), (64, 32), (80, 80)])
def test_rotary(size: int, turned: int, dtype: torch.dtype) -> None:
    x = draw(300, 42, size, dtype=dtype, device="cuda")
    assert same_rotation(BUILT["rotary"], REFERENCES["rotary"], x, turned, slice(1, 41))


@pytest.mark.parametrize("layout", [0, 1], ids=["heads outside", "tokens outside"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_prepare_is_norm_rotation_and_write(dtype: str, layout: int) -> None:
    shape = Shape([1, 2, 300], [1, 20, 700], 32, 8, 128, 64, dtype=dtype, device="cuda", layout=layout)
    case = make_case(TritonBackend, shape)
    layer, tokens = TritonBackend.layer(case.env, 0), len(case.qkv)
    q_weight, k_weight = (draw(128, dtype=case.qkv.dtype, device="cuda", seed=seed) for seed in (5, 6))
    cos_sin = angles_of(tokens, 128, "cuda")
    q, k, v = (p.contiguous() for p in torch.split(case.qkv.clone().view(tokens, 48, 128), [32, 8, 8], 1))
    q, k = rotary(rms_norm(q, q_weight, 1e-6), cos_sin), rotary(rms_norm(k, k_weight, 1e-6), cos_sin)
    apart = replace(case, cache={name: plane.clone() for name, plane in case.cache.items()})
    layer.write(k, v, apart.cache, case.step.slots)
    layer.prepare(case.qkv, cos_sin, q_weight, k_weight, 1e-6, case.cache, case.step.slots)
    assert near(case.q.contiguous(), q)
    assert near(case.cache["k"].nan_to_num(), apart.cache["k"].nan_to_num())
    assert torch.equal(case.cache["v"].nan_to_num(), apart.cache["v"].nan_to_num())
