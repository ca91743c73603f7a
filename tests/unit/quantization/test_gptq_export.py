"""GPTQ against round-to-nearest and against the definition of its rounding, column by column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from stored_world import PATH, linear, method_named, named

from jackfield.errors import ConfigError
from jackfield.interfaces import LayerInfo, OutputShard, Parallel, Settings
from jackfield_quantization import gptq_export
from jackfield_quantization.calibrated import CalibratedGptq, GptqPlan
from jackfield_quantization.gptq_export import GptqExporter, rounded
from jackfield_quantization.rounding import Rounding, to_nearest

OUTPUTS, INPUTS = 48, 128
PLANS = {
    "plain": GptqPlan(group=32),
    "zero points": GptqPlan(group=32, symmetric=False),
    "in another order": GptqPlan(group=32, reordered=True),
    "one group": GptqPlan(group=0),
    "two bits": GptqPlan(bits=2, group=64, symmetric=False),
    "eight bits": GptqPlan(bits=8, group=128),
}


def world(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix and inputs that depend on each other and differ in size, as those of a model do."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(INPUTS, INPUTS, generator=generator) * torch.logspace(0, -1.5, INPUTS)
    x = torch.randn(600, INPUTS, generator=generator) @ mixing
    return torch.randn(OUTPUTS, INPUTS, generator=generator), x


def moments(x: torch.Tensor) -> torch.Tensor:
    return x.t() @ x / len(x)


@pytest.mark.parametrize("name", PLANS)
def test_products_are_nearer_than_those_of_round_to_nearest(name: str) -> None:
    plan, (weight, x) = PLANS[name], world()
    made = rounded(weight, moments(x), plan)
    wanted = x @ weight.t()
    error, other = (float((wanted - x @ w.t()).norm()) for w in (made.meaning(), to_nearest(weight, plan).meaning()))
    assert error < 0.75 * other
    assert made.numbers.min() >= 0 and made.numbers.max() <= (1 << plan.bits) - 1
    assert torch.equal(made.scales, made.scales.half().float())


def definition(weight: torch.Tensor, h: torch.Tensor, plan: GptqPlan) -> torch.Tensor:
    """Return what the paper's equations give: after each input the best update of all that are left, by inverting the
    moments of those, in float64.
    """
    w = weight.double().clone()
    h = h.double() + plan.damping * h.diagonal().double().mean() * torch.eye(len(h), dtype=torch.float64)
    out = torch.zeros_like(w)
    rule: Any = None
    for at in range(w.shape[1]):
        if at % (plan.group or w.shape[1]) == 0:
            rule = Rounding.of(w[:, at : at + (plan.group or w.shape[1])].float(), plan)
        out[:, at] = rule.meaning(rule.numbers(w[:, at].float())).double()
        inverse = torch.linalg.inv(h[at:, at:])
        w[:, at:] -= ((w[:, at] - out[:, at]) / inverse[0, 0])[:, None] * inverse[0]
    return out


@pytest.mark.parametrize("name", ["plain", "zero points", "one group"])
@pytest.mark.parametrize("block", [128, 32, 24, 1])
def test_blocks_change_nothing_of_the_definition(monkeypatch: pytest.MonkeyPatch, name: str, block: int) -> None:
    monkeypatch.setattr(gptq_export, "BLOCK", block)
    plan, (weight, x) = PLANS[name], world(3)
    found, wanted = rounded(weight, moments(x), plan).meaning(), definition(weight, moments(x), plan)
    same = (found - wanted).abs() < 1e-4
    # A number at the edge between two may fall to the other side, and what follows makes up for it in another way.
    assert same[:, :32].float().mean() > 0.99 and same.float().mean() > 0.9
    error, other = (float((x @ (w.float() - weight).t()).norm()) for w in (found, wanted))
    assert error == pytest.approx(other, rel=0.02)


def test_inputs_that_never_come_do_not_spoil_the_rest() -> None:
    weight, x = world(1)
    x[:, 5] = 0.0
    made = rounded(weight, moments(x), PLANS["plain"]).meaning()
    assert bool(made.isfinite().all()) and bool((made[:, 5] == 0).all())
    singular = moments(x[:3])
    assert bool(rounded(weight, singular, PLANS["plain"]).meaning().isfinite().all())
    with pytest.raises(ConfigError, match="cannot be inverted"):
        rounded(weight, torch.full((INPUTS, INPUTS), float("nan")), PLANS["plain"])


def test_inputs_in_order_of_size_come_first() -> None:
    weight, x = world(2)
    made = rounded(weight, moments(x), PLANS["in another order"])
    largest = moments(x).diagonal().argsort(descending=True)
    assert made.groups[largest].tolist() == [i // 32 for i in range(INPUTS)]


@pytest.mark.parametrize("name", PLANS)
def test_the_engine_reads_what_is_written(name: str) -> None:
    plan, (weight, x) = PLANS[name], world(4)
    exporter = GptqExporter(plan)
    tensors, meaning = exporter.calibrated(weight, moments(x))
    config: Mapping[str, Any] = exporter.config(
        ["model.embed_tokens", "lm_head", "model.layers.1.mlp.up_proj", "transformer.h.0.x"]
    )
    assert config["dynamic"] == {r"-:^model\.layers\.1\.mlp\.up_proj$": {}, r"-:^transformer\.h\.0\.x$": {}}
    layer = linear(
        method_named("gptq"), config, named(f"{PATH}.o_proj", tensors), INPUTS, (OutputShard("o_proj", OUTPUTS),)
    )
    torch.testing.assert_close(layer.scheme.dequantize(layer), meaning, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("role", "outputs", "inputs", "fits"),
    [
        ("linear", 48, 256, True),
        ("linear", 48, 192, False),
        ("linear", 44, 256, False),
        ("head", 48, 256, False),
        ("embedding", 48, 256, False),
        ("experts", 48, 256, False),
    ],
)
def test_which_layers_are_written(role: str, outputs: int, inputs: int, fits: bool) -> None:
    info = LayerInfo("l", inputs, (OutputShard("", outputs),), Parallel.REPLICATED, role=role)
    scheme: Any = CalibratedGptq.scheme(info, GptqPlan())
    assert (scheme is not None) == fits
    if fits:
        with pytest.raises(ConfigError, match="writes checkpoints and runs none"):
            scheme.finalize(None)


def test_options() -> None:
    values = {"bits": 8, "group_size": 0, "desc_act": True, "symmetric": False, "damping": 0.1, "only": "mlp"}
    plan = CalibratedGptq.spec_of({}, Settings(values))
    assert plan == GptqPlan((), ("mlp",), 8, 0, symmetric=False, reordered=True, damping=0.1)
    assert CalibratedGptq.spec_of({}, Settings({})) == GptqPlan()
    for wrong in ({"group_size": -3}, {"damping": 0.0}, {"damping": 1.5}):
        with pytest.raises(ConfigError, match="has no sense"):
            CalibratedGptq.spec_of({}, Settings(wrong))
    assert replace(plan, bits=4).whole_words(8, 8) and not plan.whole_words(3, 8)
