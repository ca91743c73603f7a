"""The ops around the model on the device, against their references there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jackfield.interfaces import STEP_OPS, DeviceFacts, OpRequest
from jackfield.interfaces.plugin import Settings
from jackfield.testing.step_cases import Tables, check_greedy, check_inputs, check_rounds, check_single
from jackfield_ops.triton_ops import TritonOps

pytestmark = pytest.mark.gpu

PLAIN = {op: TritonOps.build(op, OpRequest(kind=op), Settings()) for op in STEP_OPS}


def overlapping() -> dict[str, Any]:
    """Return the ops as they are launched on this device."""
    device = DeviceFacts(type="cuda", capability=torch.cuda.get_device_capability())
    return {op: TritonOps.build(op, OpRequest(kind=op, device=device), Settings()) for op in STEP_OPS}


@pytest.mark.parametrize("pdl", [False, True])
def test_ops_are_their_references(pdl: bool) -> None:
    ops: dict[str, Any] = overlapping() if pdl else dict(PLAIN)
    for sequences in (1, 13, 64):
        for width in (1, 2, 4, 5, 8):
            tables = Tables.make(sequences, "cuda", seed=width)
            for cut in (False, True):
                check_inputs(ops["token_inputs"], tables, width, cut=cut)
            check_rounds(*(ops[name] for name in ("begin_round", "keep_tokens", "end_round")), tables, width)
        check_single(ops["keep_tokens"], tables)
    check_inputs(ops["token_inputs"], Tables.make(3, "cuda", length=9001), 2, cut=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 151_936), (3, 5000), (5, 49_152), (300, 2049)])
def test_largest_logits(rows: int, vocab: int, dtype: torch.dtype) -> None:
    check_greedy(PLAIN["greedy_tokens"], rows, vocab, dtype, "cuda")
