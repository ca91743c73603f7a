"""What norms and activations give the layers that they feed: rows, quantized rows, or the work itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_world import build_plan

from jackfield.distributed import SingleCommunicator
from jackfield.interfaces import (
    OPS,
    LayerInfo,
    OutputShard,
    Parallel,
    ParameterHolder,
    PendingNorm,
    QuantizedActivation,
)
from jackfield.layers.activation import GatedActivation
from jackfield.layers.builder import LayerBuilder
from jackfield.layers.functional import REFERENCES, settled
from jackfield.layers.linear import Linear, ThenPlain
from jackfield.layers.norm import RmsNorm
from jackfield_quantization.unquantized_scheme import DenseScheme


class Eater:
    """Likes more than two rows narrow, and folds what is beside the product of one row."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, str]] = []

    def takes_narrow(self, rows: int) -> bool:
        return rows > 2

    def folds(self, op: str, rows: int) -> bool:
        return rows == 1 and op != "gelu_and_mul"

    def gated(self, x_TI: Any, op: str) -> torch.Tensor:
        self.asked.append((x_TI, op))
        return settled(x_TI)

    def __call__(self, x_TI: Any) -> torch.Tensor:
        return settled(x_TI) * 2


def test_what_feeds_a_layer_is_quantized_where_the_layer_likes_it() -> None:
    ops = {op: REFERENCES[op] for op in REFERENCES}
    norm = RmsNorm("n", 16, 1e-6, ops, torch.float32, torch.device("cpu"))
    norm.weight.data.fill_(1.0)
    activation = GatedActivation("silu", ops)
    few, many = torch.randn(2, 16), torch.randn(3, 16)
    for source in (norm, activation):
        assert isinstance(source(many), torch.Tensor), "nobody is fed yet"
        source.feed(Eater())
        assert isinstance(source(few), torch.Tensor)
        assert isinstance(source(many), QuantizedActivation)
    made, total = norm.add(many, many)
    assert isinstance(made, QuantizedActivation) and torch.equal(total, many + many)
    plain = {op: REFERENCES[op] for op in OPS}
    bare = RmsNorm("n", 16, 1e-6, plain, torch.float32, torch.device("cpu"))
    bare.weight.data.fill_(1.0)
    bare.feed(Eater())
    assert isinstance(bare(many), torch.Tensor), "nothing can quantize here"


def test_a_norm_is_left_to_a_layer_that_folds_it() -> None:
    norm = RmsNorm("n", 16, 1e-6, dict(REFERENCES), torch.float32, torch.device("cpu"))
    norm.weight.data.copy_(torch.rand(16) + 0.5)
    x, other = torch.randn(1, 16), torch.randn(1, 16)
    wanted, plain = norm.add(x, other)[0], norm(x)
    norm.feed(Eater())
    left, total = norm.add(x, other)
    assert isinstance(left, PendingNorm) and left.total is total and total.shape == x.shape
    assert total.data_ptr() not in (x.data_ptr(), other.data_ptr()), "others still read the old stream"
    assert torch.equal(settled(left), wanted)
    assert isinstance(alone := norm(x), PendingNorm) and torch.equal(settled(alone), plain)
    assert isinstance(norm(torch.randn(2, 16)), torch.Tensor), "two rows are not folded"
    assert isinstance(norm(torch.randn(1, 32)[:, ::2]), torch.Tensor), "nor are rows that do not lie together"
    assert isinstance(norm(x.double()), torch.Tensor), "nor is another type"


def test_an_activation_is_left_to_a_projection_that_folds_it() -> None:
    ops, one, two = dict(REFERENCES), torch.randn(1, 8), torch.randn(2, 8)
    silu, gelu, projection = GatedActivation("silu", ops), GatedActivation("gelu", ops), Eater()
    assert torch.equal(silu.of(projection, one), one)
    assert torch.equal(silu.of(projection, two), silu(two * 2))
    assert torch.equal(gelu.of(projection, one), gelu(one * 2)), "which this one does not fold"
    assert [op for _, op in projection.asked] == ["silu_and_mul"]
    silu.feed(Eater())
    assert isinstance(silu.of(projection, torch.randn(3, 8)), QuantizedActivation)


def test_ops_that_the_user_named_are_not_folded() -> None:
    plan = replace(build_plan(SingleCommunicator()), named_ops=frozenset({"rms_norm", "silu_and_mul"}))
    made, one, projection = LayerBuilder(plan), torch.randn(1, 8), Eater()
    norm = made.norm("n", 8, 1e-6)
    norm.weight.data.fill_(1.0)
    norm.feed(Eater())
    assert isinstance(norm(one), torch.Tensor) and isinstance(norm.add(one, one)[0], torch.Tensor)
    assert torch.equal(made.activation("silu").of(projection, one), made.activation("silu")(one * 2))
    made.activation("gelu_tanh").of(projection, one)
    assert [op for _, op in projection.asked] == ["gelu_tanh_and_mul"]


class Folding(DenseScheme):
    """Computes what is beside its product in torch."""

    def folded_ops(self, info: LayerInfo, rows: int) -> frozenset[str]:
        return frozenset({"rms_norm", "silu_and_mul"}) if rows == 1 else frozenset()

    def apply_folded(
        self, layer: ParameterHolder, x_TI: torch.Tensor | PendingNorm, bias_O: torch.Tensor | None, gate: str = ""
    ) -> torch.Tensor:
        found = self.apply(layer, settled(x_TI), bias_O)
        return REFERENCES[gate](found) if gate else found


@pytest.mark.parametrize("stored", [False, True], ids=["alone", "behind another scheme"])
def test_a_layer_folds_what_its_scheme_folds(stored: bool) -> None:
    info = LayerInfo("up", 8, (OutputShard("gate", 4), OutputShard("up", 4)), Parallel.COLUMN, dtype="float32")
    scheme = ThenPlain(DenseScheme(), Folding()) if stored else Folding()
    layer = Linear(info, scheme, SingleCommunicator(), torch.device("cpu"))
    for shard in ("gate", "up"):
        layer.load(shard, "weight", torch.randn(4, 8))
    x = torch.randn(1, 8)
    pending = PendingNorm(x, None, None, torch.rand(8), 1e-6)
    assert layer.folds("rms_norm", 1) and not layer.folds("rms_norm", 2) and not layer.folds("gelu_and_mul", 1)
    assert torch.equal(layer(pending), layer(settled(pending)))
    assert torch.equal(layer.gated(pending, "silu_and_mul"), REFERENCES["silu_and_mul"](layer(settled(pending))))
