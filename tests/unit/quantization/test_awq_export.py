"""AWQ's search against rounding to the nearest, and what is written against a decoder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from stored_world import PATH, linear, method_named, named

from jackfield.errors import ConfigError
from jackfield.interfaces import LayerInfo, OutputShard, Parallel, Settings
from jackfield_quantization.awq_export import AwqExporter, best_factors, clipped
from jackfield_quantization.calibrated import AwqPlan, CalibratedAwq
from jackfield_quantization.rounding import nearest, to_nearest

OUTPUTS, INPUTS = 48, 128
PLANS = {"groups": AwqPlan(group=32), "one group": AwqPlan(group=0), "not clipped": AwqPlan(group=64, clip=False)}
PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that each four bits of a word hold, the lowest first."""


def world(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix and inputs of which some are much larger than others, as those of a model are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(600, INPUTS, generator=generator) * torch.logspace(0, -1.5, INPUTS)
    x[:, torch.randperm(INPUTS, generator=generator)[:4]] *= 20
    return torch.randn(OUTPUTS, INPUTS, generator=generator), x


def moments(x: torch.Tensor) -> torch.Tensor:
    return x.t() @ x / len(x)


def lost(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> float:
    return float((x @ (weight - other).t()).square().mean())


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("seed", range(4))
def test_factors_make_products_nearer(name: str, seed: int) -> None:
    plan, (weight, x) = PLANS[name], world(seed)
    factors = best_factors([weight[:16], weight[16:]], moments(x), plan)
    assert bool((factors > 0).all()) and factors.max() * factors.min() == pytest.approx(1, rel=1e-4)
    scaled = nearest(weight * factors, plan) / factors
    assert lost(x, weight, scaled) < 0.7 * lost(x, weight, nearest(weight, plan))


@pytest.mark.parametrize("kind", ["equal", "none", "one"])
def test_nothing_is_ever_worse_than_rounding(kind: str) -> None:
    """Whatever inputs there are: of one size, none at all, or a single one."""
    plan, (weight, _) = PLANS["groups"], world()
    x = torch.randn(300, INPUTS, generator=torch.Generator().manual_seed(9))
    x = {"equal": x, "none": x * 0, "one": x * (torch.arange(INPUTS) == 7)}[kind]
    factors, plain = best_factors([weight], moments(x), plan), lost(x, weight, nearest(weight, plan))
    assert bool(factors.isfinite().all())
    assert lost(x, weight, nearest(weight * factors, plan) / factors) <= plain
    assert lost(x, weight, clipped(weight, moments(x), plan).meaning()) <= plain


@pytest.mark.parametrize("name", ["groups", "one group"])
def test_spans_are_cut_where_that_helps(name: str) -> None:
    plan, (weight, x) = PLANS[name], world(5)
    weight[:, 3] *= 4
    made, whole = clipped(weight, moments(x), plan), to_nearest(weight, plan)
    errors = [(x @ (one.meaning() - weight).t()).square().mean(0) for one in (made, whole)]
    # Each output by itself, up to the order in which numbers are added.
    assert bool((errors[0] <= errors[1] * 1.0001).all()) and errors[0].sum() < 0.95 * errors[1].sum()
    assert bool((made.scales <= whole.scales).all())


def decoded(tensors: Mapping[str, torch.Tensor], group: int) -> torch.Tensor:
    """Return what a module's tensors stand for, word by word and bit by bit."""

    def numbers(words: torch.Tensor) -> torch.Tensor:
        rows = []
        for row in words.tolist():
            found = [0] * (8 * len(row))
            for at, word in enumerate(row):
                for place, column in enumerate(PLACES):
                    found[8 * at + column] = (word >> (4 * place)) & 15
            rows.append(found)
        return torch.tensor(rows)

    whole, zeros = numbers(tensors["qweight"]), numbers(tensors["qzeros"])
    scales = tensors["scales"].float()
    groups = torch.arange(len(whole)) // (group or len(whole))
    return ((whole - zeros[groups]) * scales[groups]).t()


@pytest.mark.parametrize("name", PLANS)
def test_the_engine_reads_what_is_written(name: str) -> None:
    plan, (weight, x) = PLANS[name], world(4)
    exporter, count = AwqExporter(plan), INPUTS // (plan.group or INPUTS)
    tensors, meaning = exporter.calibrated(weight, moments(x))
    shapes = {"qweight": (INPUTS, OUTPUTS // 8), "qzeros": (count, OUTPUTS // 8), "scales": (count, OUTPUTS)}
    assert {suffix: tuple(tensor.shape) for suffix, tensor in tensors.items()} == shapes
    assert [tensors[n].dtype for n in ("qweight", "qzeros", "scales")] == [torch.int32, torch.int32, torch.float16]
    torch.testing.assert_close(decoded(tensors, plan.group), meaning, rtol=1e-6, atol=1e-7)
    config: Mapping[str, Any] = exporter.config(["lm_head", "model.layers.1.mlp.up_proj"])
    assert config == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": plan.group or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.up_proj"],
    }
    layer = linear(
        method_named("awq"), config, named(f"{PATH}.o_proj", tensors), INPUTS, (OutputShard("o_proj", OUTPUTS),)
    )
    torch.testing.assert_close(layer.scheme.dequantize(layer), meaning, rtol=1e-6, atol=1e-7)


def layer_of(role: str, outputs: int, inputs: int) -> LayerInfo:
    return LayerInfo("l", inputs, (OutputShard("", outputs),), Parallel.REPLICATED, role=role)


@pytest.mark.parametrize(
    ("role", "outputs", "fits"),
    [
        ("linear", 48, True),
        ("linear", 44, False),
        ("head", 48, False),
        ("embedding", 48, False),
        ("experts", 48, False),
    ],
)
def test_which_layers_are_written(role: str, outputs: int, fits: bool) -> None:
    scheme: Any = CalibratedAwq.scheme(layer_of(role, outputs, 256), AwqPlan())
    assert (scheme is not None) == fits
    if fits:
        with pytest.raises(ConfigError, match="calibrated_awq writes checkpoints and runs none"):
            scheme.finalize(None)


def test_groups_must_divide_all_inputs() -> None:
    with pytest.raises(ConfigError, match="192 inputs of l are no whole groups") as error:
        CalibratedAwq.scheme(layer_of("linear", 48, 192), AwqPlan())
    assert error.value.field == "plugins.options.calibrated_awq.group_size" and error.value.value == 128
    assert "ignore" in str(error.value.remedy)
    assert CalibratedAwq.scheme(layer_of("linear", 48, 192), AwqPlan(ignore=("l",))) is None
    assert CalibratedAwq.scheme(layer_of("linear", 48, 192), AwqPlan(group=0)) is not None


def test_options() -> None:
    values = {"group_size": 64, "clip": False, "only": "mlp"}
    assert CalibratedAwq.spec_of({}, Settings(values)) == AwqPlan((), ("mlp",), group=64, clip=False)
    assert CalibratedAwq.spec_of({}, Settings({})) == AwqPlan() == CalibratedAwq.parse({})
    with pytest.raises(ConfigError, match="group_size has no sense") as error:
        CalibratedAwq.spec_of({}, Settings({"group_size": -3}))
    assert error.value.value == -3 and error.value.remedy
