"""Drafts that branch, on the device: each sees what it would see if its path alone had been drafted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.testing.attention import BRANCHES
from jackfield.testing.attention_cases import make_case, reference, run
from jackfield.testing.attention_shapes import Shape
from jackfield_attention.flex import FlexBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_attention.triton_backend import TritonBackend

pytestmark = pytest.mark.gpu
PLAIN = Shape(ratio=4, head_size=64, value_size=64, block_size=16, dtype="bfloat16", tree=True)
SHAPES = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=9),
    "chunks": replace(PLAIN, window=8, chunked=True),
    "softcap and sinks": replace(PLAIN, softcap=2.0, sinks=True),
}


@pytest.mark.parametrize("backend", [TritonBackend, TorchSdpaBackend, FlexBackend], ids=lambda backend: backend.name)
@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_draft_sees_its_ancestors(backend: Any, shape: str, branches: str) -> None:
    case = make_case(backend, SHAPES[shape], BRANCHES[branches], device=torch.device("cuda"))
    torch.testing.assert_close(run(backend, case).double(), reference(case), rtol=4e-2, atol=4e-2)
