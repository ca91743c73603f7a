"""Drafts that branch, in Triton: each sees what it would see if its path alone had been drafted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.interfaces import DeviceFacts, StepLimits
from jackfield.testing.attention import BRANCHES, WIDE
from jackfield.testing.attention_cases import Query, make_case, reference, run
from jackfield.testing.attention_shapes import Shape
from jackfield_attention.triton_backend import TritonBackend

PLAIN = Shape(head_size=32, value_size=32, block_size=16, tree=True)
SHAPES = {
    "plain": PLAIN,
    "one cache head": replace(PLAIN, kv_heads=1, ratio=7),
    "many heads on one": replace(PLAIN, kv_heads=1, ratio=16),
    "window": replace(PLAIN, window=9),
    "window shorter than a path": replace(PLAIN, window=3),
    "chunks": replace(PLAIN, window=8, chunked=True),
    "softcap and sinks": replace(PLAIN, softcap=2.0, sinks=True),
    "half": replace(PLAIN, dtype="float16"),
}
TOLERANCE = {"float32": 2e-5, "float16": 5e-3}
FACTS = DeviceFacts("cuda", capability=(9, 0), cores=4)


class OnFourCores(TritonBackend):
    """Keys are split as on a small device, so that parts must be put together."""

    @classmethod
    def metadata_builder(cls, env: Any) -> Any:
        return super().metadata_builder(replace(env, request=replace(env.request, device=FACTS)))


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_draft_sees_its_ancestors(shape: str, branches: str) -> None:
    case = make_case(OnFourCores, SHAPES[shape], BRANCHES[branches])
    bound = TOLERANCE[case.shape.dtype]
    torch.testing.assert_close(run(OnFourCores, case).double(), reference(case), rtol=bound, atol=bound)


def test_a_step_with_branches_is_not_taken_for_a_recorded_one() -> None:
    case = make_case(TritonBackend, PLAIN, [Query(3, 5, (-1, -1)), Query(4, 0, (-1, 0, 0))])
    builder: Any = TritonBackend.metadata_builder(case.env)
    builder.allocate(StepLimits(8, 4, case.step.block_table.shape[1], 64))
    builder.capture(2, 1)
    built = builder.build(case.step)
    assert built.branches is not None and built.query_start is case.step.query_start
    assert builder.advance(1).branches is None


def test_windows_hide_ancestors_in_front_of_them() -> None:
    case = make_case(TritonBackend, replace(PLAIN, window=2), [Query(1 + len(WIDE), 17, WIDE)])
    builder: Any = TritonBackend.metadata_builder(case.env)
    builder.allocate(StepLimits(32, 4, case.step.block_table.shape[1], 64))
    bits = builder.build(case.step).branches.bits.tolist()
    # Itself and its parent are left of each draft's ancestors.
    assert bits == [0] + [1 << own | (1 << parent if parent >= 0 else 0) for own, parent in enumerate(WIDE)]
