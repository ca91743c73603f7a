"""Layers with states in Triton: each recurrence by its definition, in pieces that come one by one and many at once."""

from __future__ import annotations

import pytest
import torch

from jackfield.interfaces import AttentionEnv, DeviceFacts, StepLimits
from jackfield.interfaces.plugin import Settings
from jackfield.testing.attention_shapes import STATE_SHAPES, state_request
from jackfield.testing.state_cases import convolution, definition, make_inputs, run_convolution, run_states
from jackfield_attention.triton_states import TritonStatesBackend
from jackfield_attention.triton_states_layer import TritonStateBuilder

DEVICE = torch.device("cpu")
KINDS = list(STATE_SHAPES)
CUTS: dict[str, list[list[int]]] = {
    "token by token": [list(range(1, 7)), list(range(1, 5)), [1]],
    "prompts, then tokens": [[4, 5, 6], [3, 4], []],
    "mixed steps": [[1, 5], [3, 4], [1]],
}
LENGTHS = (7, 5, 2)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("in_place", [False, True], ids=["new pages", "in place"])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_the_definition(kind: str, cuts: str, in_place: bool) -> None:
    inputs = make_inputs(kind, LENGTHS, seed=3)
    found = run_states(TritonStatesBackend, kind, inputs, CUTS[cuts], DEVICE, in_place=in_place)
    for rows, tokens in zip(found, inputs.sequences, strict=True):
        assert error(rows, definition(kind, tokens, inputs.constants)) < 2e-5


@pytest.mark.parametrize("cuts", CUTS)
def test_convolutions_go_on(cuts: str) -> None:
    inputs = make_inputs("short_conv", LENGTHS, seed=4)
    found = run_convolution(TritonStatesBackend, "short_conv", inputs, CUTS[cuts], DEVICE)
    for rows, tokens in zip(found, inputs.sequences, strict=True):
        plain = convolution(tokens["x"], inputs.constants["weight"], inputs.constants["bias"])
        assert error(rows, torch.nn.functional.silu(plain)) < 2e-5


def test_a_recorded_step_has_pages_of_its_own() -> None:
    request = state_request("gdn")
    spec = TritonStatesBackend.cache_specs(request)[0]
    builder = TritonStateBuilder(AttentionEnv(request, spec, 16, DEVICE, Settings()))
    builder.allocate(StepLimits(4, 4, 1, 32))
    recorded = builder.capture(3, 1)
    assert recorded.pages.tolist() == [[-1, -1]] * 3 and recorded.fresh.all()
    with pytest.raises(NotImplementedError, match="single tokens"):
        builder.capture(3, 2)


def test_old_devices_are_refused() -> None:
    from dataclasses import replace

    old = replace(state_request("mamba2"), device=DeviceFacts("cuda", capability=(7, 5)))
    assert [reason.code for reason in TritonStatesBackend.check(old)] == ["capability"]
