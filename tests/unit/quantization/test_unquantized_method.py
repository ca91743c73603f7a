from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

from jackfield.interfaces import (
    LayerInfo,
    OutputShard,
    Parallel,
    QuantizationRequest,
    QuantizedActivation,
    RankInfo,
)
from jackfield_quantization.unquantized import Unquantized


class Holder:
    """The least a layer can be."""

    def __init__(self, info: LayerInfo, weight: torch.Tensor) -> None:
        self.info = info
        self.weight = weight

    def get_parameter(self, target: str) -> torch.Tensor:
        assert target == "weight"
        return self.weight

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError


COLUMN = LayerInfo(
    "layers.0.attn.qkv",
    6,
    (OutputShard("q", 8, unit=2), OutputShard("k", 4, unit=2), OutputShard("v", 4, unit=2)),
    Parallel.COLUMN,
    dtype="bfloat16",
    rank=RankInfo(1, 2),
)


@pytest.mark.parametrize(
    ("info", "shape", "dims"),
    [
        (COLUMN, (8, 6), (0, 1)),
        (LayerInfo("o", 6, (OutputShard("", 5),), Parallel.ROW, rank=RankInfo(0, 2)), (5, 3), (0, 1)),
        (LayerInfo("r", 6, (OutputShard("", 5),), Parallel.REPLICATED, rank=RankInfo(0, 2)), (5, 6), (0, 1)),
        (
            LayerInfo("x", 6, (OutputShard("gate", 4), OutputShard("up", 4)), Parallel.REPLICATED, num_experts=3),
            (3, 8, 6),
            (1, 2),
        ),
    ],
    ids=["column", "row", "replicated", "experts"],
)
def test_parameters(info: LayerInfo, shape: tuple[int, ...], dims: tuple[int, int]) -> None:
    (spec,) = Unquantized.scheme(info, None).parameters(info)
    assert (spec.name, spec.suffix, spec.shape, spec.dtype, spec.shard) == ("weight", "weight", shape, info.dtype, None)
    assert (spec.output_dim, spec.input_dim) == dims


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_apply(with_bias: bool, rows: int) -> None:
    weight, x = torch.randn(8, 6, dtype=torch.float64), torch.randn(rows, 6, dtype=torch.float64)
    bias = torch.randn(8, dtype=torch.float64) if with_bias else None
    layer, scheme = Holder(COLUMN, weight), Unquantized.scheme(COLUMN, None)
    want = torch.stack([weight @ row + (bias if bias is not None else 0) for row in x]) if rows else x.new_empty(0, 8)
    torch.testing.assert_close(scheme.apply(layer, x, bias), want)
    out = torch.full((rows, 8), torch.nan, dtype=torch.float64)
    assert scheme.apply(layer, x, bias, out) is out
    torch.testing.assert_close(out, want)


def test_lookup_and_dequantize() -> None:
    weight = torch.randn(8, 6)
    layer, scheme = Holder(COLUMN, weight), Unquantized.scheme(COLUMN, None)
    torch.testing.assert_close(
        scheme.lookup(layer, torch.tensor([3, 0, 3])), torch.stack([weight[i] for i in (3, 0, 3)])
    )
    assert scheme.dequantize(layer) is weight


def test_quantized_activations_are_refused() -> None:
    layer, scheme = Holder(COLUMN, torch.randn(8, 6)), Unquantized.scheme(COLUMN, None)
    activation = QuantizedActivation(torch.zeros(1, 6, dtype=torch.int8), torch.ones(1))
    with pytest.raises(TypeError, match="a dense weight takes plain activations"):
        scheme.apply(layer, activation, None)


def test_online_conversion_is_refused() -> None:
    assert not Unquantized.check(QuantizationRequest())
    (reason,) = Unquantized.check(QuantizationRequest(online="fp8"))
    assert (reason.code, reason.fact, reason.detail) == (
        "online",
        "online",
        "unquantized does not convert weights to 'fp8'",
    )


def test_light_modules_stay_light() -> None:
    code = (
        "import sys, jackfield_quantization.unquantized, jackfield_quantization.gguf; "
        "print([name for name in ('torch', 'numpy', 'gguf') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
