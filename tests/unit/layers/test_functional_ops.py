"""Every published op against its formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from jackfield.interfaces import OPS, QUANTIZING_OPS, ROUTING_OPS, SAMPLING_OPS, STEP_OPS, OpRequest, Settings
from jackfield.layers.functional import REFERENCES
from jackfield_ops.torch_ops import TorchOps

Floats = npt.NDArray[np.float64]
GENERATOR = np.random.default_rng(0)


def normed(x: Floats, weight: Floats, eps: float) -> Floats:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight)


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(GENERATOR.normal(size=shape)).to(dtype)


def exact(x: torch.Tensor) -> Floats:
    return np.array(x.double().numpy())


RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def test_every_published_op_has_a_reference() -> None:
    assert set(REFERENCES) == {*OPS, *QUANTIZING_OPS, *SAMPLING_OPS, *ROUTING_OPS, *STEP_OPS} == set(TorchOps.kinds)
    for op in OPS:
        assert TorchOps.build(op, OpRequest(kind=op), Settings()) is REFERENCES[op]


@DTYPES
@pytest.mark.parametrize("shape", [(5, 16), (3, 4, 8), (0, 16)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = tensors(*shape, dtype=dtype), tensors(shape[-1], dtype=dtype)
    y = REFERENCES["rms_norm"](x, weight, 1e-5)
    assert y.dtype == dtype
    np.testing.assert_allclose(
        exact(y), normed(exact(x), exact(weight), 1e-5), atol=TOLERANCE[dtype], rtol=RELATIVE[dtype]
    )


def test_rms_norm_keeps_tiny_rows_by_its_epsilon() -> None:
    y = REFERENCES["rms_norm"](torch.full((1, 4), 1e-6), torch.ones(4), 1e-6)
    np.testing.assert_allclose(exact(y), normed(np.full((1, 4), 1e-6), np.ones(4), 1e-6), rtol=1e-5)


@DTYPES
def test_fused_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (tensors(6, 16, dtype=dtype), tensors(6, 16, dtype=dtype), tensors(16, dtype=dtype))
    kept = x.clone(), residual.clone()
    y, total = REFERENCES["fused_add_rms_norm"](x, residual, weight, 1e-6)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
    np.testing.assert_allclose(exact(total), exact(x) + exact(residual), atol=TOLERANCE[dtype], rtol=RELATIVE[dtype])
    np.testing.assert_allclose(
        exact(y), normed(exact(total), exact(weight), 1e-6), atol=TOLERANCE[dtype], rtol=RELATIVE[dtype]
    )


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@DTYPES
@pytest.mark.parametrize(
    ("op", "formula"), [("silu_and_mul", silu), ("gelu_and_mul", gelu), ("gelu_tanh_and_mul", gelu_tanh)]
)
def test_gated_activations(op: str, formula: Callable[[float], float], dtype: torch.dtype) -> None:
    x = tensors(4, 10, dtype=dtype) * 3
    kept = x.clone()
    y = REFERENCES[op](x)
    wide = exact(x)
    expected = np.vectorize(formula)(wide[:, :5]) * wide[:, 5:]
    assert torch.equal(x, kept)
    np.testing.assert_allclose(exact(y), expected, atol=TOLERANCE[dtype] * 4, rtol=RELATIVE[dtype])


@pytest.mark.parametrize("size", [8, 4])
@DTYPES
def test_rotary_turns_pairs_and_leaves_the_rest(size: int, dtype: torch.dtype) -> None:
    x = tensors(3, 2, 8, dtype=dtype)
    before = exact(x)
    angles = GENERATOR.uniform(-3, 3, (3, size // 2))
    table = torch.from_numpy(np.concatenate((np.cos(angles), np.sin(angles)), -1)).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    assert REFERENCES["rotary"](x, table) is x
    after = exact(x)
    half = size // 2
    for token in range(3):
        for head in range(2):
            for i in range(half):
                low, high = before[token, head, i], before[token, head, i + half]
                turned = complex(low, high) * complex(math.cos(angles[token, i]), math.sin(angles[token, i]))
                assert after[token, head, i] == pytest.approx(turned.real, abs=TOLERANCE[dtype])
                assert after[token, head, i + half] == pytest.approx(turned.imag, abs=TOLERANCE[dtype])
    assert np.array_equal(after[..., size:], before[..., size:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_forms_are_the_plain_ones_rounded_row_by_row(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(5, 64, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    weight = torch.linspace(0.5, 2.0, 64).to(dtype)
    plain = {"rms_norm": (x, weight, 1e-6), "fused_add_rms_norm": (x, residual, weight, 1e-6), "silu_and_mul": (x,)}
    for op, arguments in plain.items():
        found, wanted = REFERENCES[f"{op}_quant"](*arguments), REFERENCES[op](*arguments)
        if isinstance(found, tuple):
            assert torch.equal(found[1], wanted[1])
            found, wanted = found[0], wanted[0]
        assert found.values.dtype == torch.float8_e4m3fn and found.scales.shape == (5,)
        torch.testing.assert_close(found.scales, wanted.float().abs().amax(-1) / 448.0)
        back = found.values.float() * found.scales.unsqueeze(-1)
        # Three bits of mantissa, and even steps far below the largest number of a row.
        bound = wanted.float().abs() / 16 + found.scales.unsqueeze(-1) * 2.0**-10
        assert bool(((back - wanted.float()).abs() <= bound * 1.0001).all())
