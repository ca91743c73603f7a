"""The Triton ops around the model against their references, bit by bit."""

from __future__ import annotations

import pytest
import torch

from jackfield.interfaces import STEP_OPS, OpRequest
from jackfield.interfaces.plugin import Settings
from jackfield.testing.step_cases import Tables, check_greedy, check_inputs, check_rounds, check_single
from jackfield_ops.triton_ops import TritonOps

OPS = {op: TritonOps.build(op, OpRequest(kind=op), Settings()) for op in STEP_OPS}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("sequences", [1, 13])
def test_what_tokens_take_from_the_tables(sequences: int, width: int, cut: bool) -> None:
    check_inputs(OPS["token_inputs"], Tables.make(sequences, "cpu"), width, cut=cut)


def test_long_tables_are_copied_whole() -> None:
    check_inputs(OPS["token_inputs"], Tables.make(3, "cpu", length=9001), 2, cut=True)


@pytest.mark.parametrize("width", [1, 3, 4, 7])
@pytest.mark.parametrize("sequences", [1, 40])
def test_rounds(sequences: int, width: int) -> None:
    check_rounds(OPS["begin_round"], OPS["keep_tokens"], OPS["end_round"], Tables.make(sequences, "cpu"), width)


def test_one_token_for_each_sequence() -> None:
    check_single(OPS["keep_tokens"], Tables.make(9, "cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 49_152), (3, 5000), (5, 2048), (300, 2049)])
def test_largest_logits(rows: int, vocab: int, dtype: torch.dtype) -> None:
    check_greedy(OPS["greedy_tokens"], rows, vocab, dtype, "cpu")
