"""Layers whose values are of another size than their keys, from projections to results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jackfield.interfaces import AttentionGroup, StepLimits
from jackfield.layers.attention import Attention
from jackfield.layers.functional import REFERENCES
from jackfield.testing.attention_cases import STEPS, make_case, reference
from jackfield.testing.attention_shapes import Shape
from jackfield.worker.context import StepContext
from jackfield_attention.flex import FlexBackend
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_native.toolchain import unavailable

BACKENDS: list[Any] = [TorchSdpaBackend, FlexBackend, *([] if unavailable() else [NativeCpuBackend])]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("value_size", [4, 12])
@pytest.mark.parametrize("kind", list(STEPS))
def test_a_layer_takes_its_values_from_behind_its_keys(backend: Any, value_size: int, kind: str) -> None:
    shape = Shape(value_size=value_size, block_size=16)
    assert "diff_kv" in backend.features and not backend.check(shape.request())
    case = make_case(backend, shape, STEPS[kind])
    group = AttentionGroup(
        name="full",
        kind="full",
        layers=(0,),
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        value_head_size=value_size,
    )
    heads = shape.heads, shape.kv_heads
    part, fused = backend.layer(case.env, 0), backend.prepares
    layer = Attention(0, "full", group, part, *heads, REFERENCES, None, None, None, fused=fused)
    builder = backend.metadata_builder(case.env)
    step = case.step
    builder.allocate(StepLimits(step.num_tokens, step.num_sequences, step.block_table.shape[1], step.max_length))
    ctx = StepContext({0: case.cache}, {"full": builder.build(step)}, {"full": step.slots})
    qkv = torch.cat([part.flatten(1) for part in (case.q_THD, case.k_TKD, case.v_TKV)], 1)
    found = layer(qkv, step.positions, ctx)
    assert found.shape == (step.num_tokens, shape.heads * value_size)
    torch.testing.assert_close(
        found.view(step.num_tokens, shape.heads, -1).double(), reference(case), rtol=1e-5, atol=1e-5
    )
