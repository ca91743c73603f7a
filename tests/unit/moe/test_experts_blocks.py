"""Blocks of experts against the loop: activations, biases, weights on inputs, zero experts, shared ones, layouts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_world import CPU, build, expected, numbers

from jackfield.errors import ConfigError, PluginError
from jackfield.interfaces import ExpertsBackend, ExpertsRequest, MoEConfig
from jackfield.interfaces.moe import ExpertMatrices
from jackfield.layers.side import SideStream
from jackfield_moe.activations import activation_of
from jackfield_moe.layouts import E2M1, matrix_of
from jackfield_moe.torch_experts import TorchExperts
from jackfield_moe.torch_grouped import TorchGrouped
from jackfield_quantization.fp8 import Fp8

ODD = MoEConfig(num_experts=6, top_k=2, hidden_size=5, intermediate_size=3)
EVEN = replace(ODD, hidden_size=8, intermediate_size=4)
"""Of sizes that torch's grouped product takes."""

BLOCKS: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu": {"activation": "gelu"},
    "tanh": {"activation": "gelu_pytorch_tanh"},
    "gated relu2": {"activation": "relu2"},
    "plain relu2": {"activation": "relu2", "gated": False},
    "plain silu": {"activation": "silu", "gated": False, "bias": True},
    "biases": {"bias": True},
    "clamped": {"activation": "swiglu_oai", "bias": True, "alpha": 1.3, "limit": 0.7},
    "stepped": {"activation": "swiglu_step", "limit": 0.4},
    "tangents": {"activation": "situ", "alpha": 0.8, "limit": 0.6},
    "logits as weights": {"scoring": "none", "renormalize": False},
    "weights on inputs": {"weigh_input": True, "scoring": "sigmoid_chosen", "renormalize": False},
    "one weight on inputs": {"weigh_input": True, "scoring": "sigmoid_chosen", "renormalize": False, "top_k": 1},
    "zero experts": {"zero_experts": 3, "top_k": 4},
    "a scale": {"scale": 2.5},
}


def check(config: MoEConfig, tokens: int, backend: type[ExpertsBackend] = TorchExperts) -> None:
    x, logits = numbers(tokens, config.hidden_size, seed=3), numbers(tokens, 6 + config.zero_experts, seed=4)
    found = build(config, backend)(x, logits)
    torch.testing.assert_close(found.double(), expected(config, x, logits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 13])
@pytest.mark.parametrize("base", [ODD, EVEN], ids=["odd", "even"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_equal_the_loop(name: str, base: MoEConfig, tokens: int) -> None:
    check(replace(base, **BLOCKS[name]), tokens)


def test_torchs_grouped_product_is_really_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield_moe.torch_experts._one_by_one", None)
    check(EVEN, 9)
    check(EVEN, 9, TorchGrouped)


@pytest.mark.parametrize("name", ["biases", "plain relu2", "clamped"])
def test_the_backend_for_devices_computes_the_same_here(name: str) -> None:
    check(replace(EVEN, **BLOCKS[name]), 9, TorchGrouped)


@pytest.mark.parametrize("base", [ODD, EVEN], ids=["odd", "even"])
def test_experts_without_rows_and_one_with_all(base: MoEConfig) -> None:
    config = replace(base, top_k=1)
    x, logits = numbers(11, config.hidden_size, seed=3), torch.full((11, 6), -50.0)
    logits[:, 4] = 50.0
    torch.testing.assert_close(build(config)(x, logits).double(), expected(config, x, logits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", [ODD, EVEN], ids=["odd", "even"])
def test_the_expert_of_somebody_else_adds_nothing(base: MoEConfig) -> None:
    block = build(base)
    backend = TorchExperts.build(ExpertsRequest(needs=frozenset({"partial"})))
    x, weights = numbers(4, base.hidden_size), numbers(4, 2, seed=8)
    matrices = block.gate_up.matrices(), block.down.matrices()
    experts = torch.tensor([[1, -1], [-1, -1], [5, 1], [-1, 0]])
    found = backend.apply(x, *matrices, weights, experts)
    alone = TorchExperts.build(ExpertsRequest()).apply(
        x, *matrices, weights.masked_fill(experts < 0, 0.0), experts.clamp(min=0)
    )
    torch.testing.assert_close(found, alone)
    assert not found[1].any()


def test_shared_experts_are_added() -> None:
    block, x, logits = build(EVEN), numbers(5, 8), numbers(5, 6, seed=4)
    torch.testing.assert_close(block(x, logits, None, lambda rows: rows * 2), block(x, logits) + x * 2)


def test_the_bias_of_the_choice_goes_to_the_router() -> None:
    config = replace(EVEN, scoring="sigmoid")
    x, logits, bias = numbers(5, 8), numbers(5, 6, seed=4), numbers(6, seed=5)
    found = build(config)(x, logits, bias).double()
    torch.testing.assert_close(found, expected(config, x, logits, bias), rtol=1e-5, atol=1e-5)


def test_shared_work_runs_last_on_a_cpu() -> None:
    ran: list[int] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        ran.append(len(x))
        return x

    result = SideStream(CPU).start(work, torch.ones(2, 2))
    assert ran == []
    assert result().sum() == 4 and ran == [2]


class FakeStream:
    """Writes down who waits for whom."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: FakeStream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.events.append(f"on {self.name}")

    def __exit__(self, *error: object) -> None:
        self.events.append(f"off {self.name}")


def test_shared_work_runs_beside_on_devices_with_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    main, side = FakeStream("main", events), FakeStream("side", events)
    monkeypatch.setattr(torch, "Stream", lambda device: side)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: main)
    streams = SideStream(torch.device("meta"), limit=3)
    added = streams.start(lambda x: x + 1, torch.zeros(3))
    events.append("routed")
    assert added().tolist() == [1.0] * 3
    assert events == ["side waits for main", "on side", "off side", "routed", "main waits for side"]
    streams.start(lambda x: x, torch.zeros(4))()
    assert len(events) == 5


def test_converted_experts_load_as_dense_ones_and_are_near_them() -> None:
    config = replace(EVEN, hidden_size=32, intermediate_size=16)
    block = build(config, method=Fp8)
    x, logits = numbers(7, 32, seed=3), numbers(7, 6, seed=4)
    matrices = block.gate_up.matrices()
    assert (matrices.layout, matrices.weight.dtype) == ("fp8", torch.float8_e4m3fn)
    assert matrices.scale is not None and matrices.scale.shape == (6, 32, 1)
    wanted = expected(config, x, logits)
    gap = (block(x, logits).double() - wanted).norm() / wanted.norm()
    assert 0.001 < gap < 0.06


def test_layouts_must_be_the_backends() -> None:
    with pytest.raises(PluginError) as caught:
        build(EVEN, TorchGrouped, Fp8)
    assert caught.value.message == ("moe.gate_up is in the layout 'fp8', which the experts backend does not take")
    assert (caught.value.field, caught.value.value) == ("moe", "torch_grouped")


def test_layouts_as_they_are_written() -> None:
    packed = torch.tensor([[[0x21, 0xF9]]], dtype=torch.uint8)
    ones = torch.ones(1, 1, 2)
    found = matrix_of(ExpertMatrices("int4", packed, ones), 0, torch.float32)
    assert found.tolist() == [[-7.0, -6.0, 1.0, 7.0]]
    zero = torch.tensor([[[1, 2]]], dtype=torch.uint8)
    found = matrix_of(ExpertMatrices("int4", packed, ones * 2, zero), 0, torch.float32)
    assert found.tolist() == [[0.0, 2.0, 14.0, 26.0]]
    exponent = torch.full((1, 1, 1), 128, dtype=torch.uint8)
    found = matrix_of(ExpertMatrices("mxfp4", packed, exponent), 0, torch.float32)
    assert found.tolist() == [[2 * E2M1[code] for code in (1, 2, 9, 15)]] == [[1.0, 2.0, -1.0, -12.0]]
    blocks = torch.tensor([[[1.0, 10.0], [100.0, 1000.0]]])
    found = matrix_of(ExpertMatrices("int8", torch.ones(1, 4, 3, dtype=torch.int8), blocks), 0, torch.float32)
    assert found[:, 0].tolist() == [1.0, 1.0, 100.0, 100.0]
    assert found[0].tolist() == [1.0, 1.0, 10.0]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def bounded(x: float, least: float, most: float) -> float:
    return min(max(x, least), most)


GATES: dict[str, tuple[dict[str, Any], Any]] = {
    "silu": ({}, lambda g, u: g * sigmoid(g) * u),
    "gelu": ({}, lambda g, u: g * 0.5 * (1 + math.erf(g / math.sqrt(2))) * u),
    "gelu_tanh": (
        {},
        lambda g, u: g * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
    ),
    "relu2": ({}, lambda g, u: max(g, 0.0) ** 2 * u),
    "swiglu_oai": (
        {"alpha": 1.3, "limit": 0.7},
        lambda g, u: (bounded(u, -0.7, 0.7) + 1) * min(g, 0.7) * sigmoid(1.3 * min(g, 0.7)),
    ),
    "swiglu_step": ({"limit": 0.4}, lambda g, u: min(g * sigmoid(g), 0.4) * bounded(u, -0.4, 0.4)),
    "situ": (
        {"alpha": 0.8, "limit": 0.6},
        lambda g, u: 0.8 * math.tanh(g / 0.8) * sigmoid(g) * 0.6 * math.tanh(u / 0.6),
    ),
    "situ, up as it is": ({"alpha": 0.8, "limit": 0.0}, lambda g, u: 0.8 * math.tanh(g / 0.8) * sigmoid(g) * u),
}
ALONE = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("name", GATES)
def test_gated_activations_number_by_number(name: str) -> None:
    """Written out, since the loop above takes the same functions."""
    options, wanted = GATES[name]
    rows = numbers(3, 14, seed=6) * 2
    found = activation_of(ExpertsRequest(activation=name.split(",")[0], **options))(rows)
    pairs = [[wanted(g, u) for g, u in zip(row[:7], row[7:], strict=True)] for row in rows.double().tolist()]
    torch.testing.assert_close(found.double(), torch.tensor(pairs, dtype=torch.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALONE)
def test_activations_without_a_gate_number_by_number(name: str) -> None:
    rows = numbers(3, 7, seed=6) * 2
    found = activation_of(ExpertsRequest(activation=name, gated=False))(rows)
    wanted = [[ALONE[name](x) for x in row] for row in rows.double().tolist()]
    torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_an_activation_that_nobody_knows() -> None:
    with pytest.raises(ConfigError) as caught:
        activation_of(ExpertsRequest(activation="sillu"))
    assert caught.value.message == "the activation 'sillu' is not known"
    assert caught.value.remedy == "did you mean 'silu'?"
