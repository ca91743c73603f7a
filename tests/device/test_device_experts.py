"""Routing and experts on the device against torch's references, for every way of launching."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jackfield.interfaces import MoEConfig
from jackfield.interfaces.moe import ExpertMatrices, experts_request
from jackfield.layers.routing import SCORES, route
from jackfield_moe.torch_experts import TorchExperts
from jackfield_moe.triton_experts import TritonExperts
from jackfield_ops.triton_route import route_experts

pytestmark = pytest.mark.gpu
BLOCK = MoEConfig(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)


def matrices(outputs: int, inputs: int) -> ExpertMatrices:
    shape = (BLOCK.num_experts, outputs, inputs)
    return ExpertMatrices("dense", torch.randn(shape, dtype=torch.bfloat16, device="cuda") * inputs**-0.5)


@pytest.mark.parametrize("rows", [1, 3, 5, 64, 200, 600, 2100, 5000])
def test_experts_are_those_of_torch(rows: int) -> None:
    torch.manual_seed(rows)
    up, down = matrices(2 * BLOCK.intermediate_size, BLOCK.hidden_size), matrices(2048, BLOCK.intermediate_size)
    x = torch.randn(rows, BLOCK.hidden_size, dtype=torch.bfloat16, device="cuda")
    experts = torch.rand(rows, BLOCK.num_experts, device="cuda").topk(BLOCK.top_k).indices
    weights = torch.rand(rows, BLOCK.top_k, device="cuda")
    request = experts_request(BLOCK, "dense", dtype="bfloat16")
    found, wanted = (
        backend.build(request).apply(x, up, down, weights, experts).float() for backend in (TritonExperts, TorchExperts)
    )
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("scoring", list(SCORES))
def test_tokens_go_where_the_reference_sends_them(scoring: str, grouped: bool) -> None:
    config = replace(BLOCK, scoring=scoring)
    if grouped:
        config = replace(config, num_groups=8, top_groups=4, group_score="top2", scale=2.5)
    generator = torch.Generator().manual_seed(7)
    logits, bias = torch.randn(300, 128, generator=generator) * 3, torch.randn(128, generator=generator)
    weights, experts = route_experts(logits.cuda(), config, bias.cuda())
    wanted, names = route(logits, config, bias)
    assert torch.equal(experts.cpu(), names)
    torch.testing.assert_close(weights.cpu(), wanted, rtol=1e-4, atol=1e-5)
