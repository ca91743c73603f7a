"""Dual-chunk attention of the reference backend: every kind of step, and who is asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.interfaces import AttentionBackend
from jackfield.oracle.judge import set_reasons
from jackfield.testing.attention_cases import STEPS, Query, make_case, reference, run
from jackfield.testing.attention_shapes import Shape
from jackfield_attention import torch_dual_chunk
from jackfield_attention.flash_attn import FlashAttnBackend
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_attention.triton_backend import TritonBackend

LONG = [Query(70), Query(33, 90), Query(1, 130), Query(8, 57)]


def check(shape: Shape, queries: Sequence[Query]) -> None:
    case = make_case(TorchSdpaBackend, shape, queries, seed=3)
    torch.testing.assert_close(run(TorchSdpaBackend, case), reference(case), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("kind", [*STEPS, "long"])
def test_every_step_equals_the_definition(kind: str, chunk: int, block_size: int) -> None:
    check(Shape(dual_chunk=chunk, block_size=block_size, dtype="float64", ratio=3), STEPS.get(kind, LONG))


@pytest.mark.parametrize(("piece", "tile"), [(1, 1), (5, 3), (64, 8), (3, 100)])
def test_how_long_queries_are_cut_changes_nothing(monkeypatch: pytest.MonkeyPatch, piece: int, tile: int) -> None:
    monkeypatch.setattr(torch_dual_chunk, "PIECE", piece)
    monkeypatch.setattr(torch_dual_chunk, "TILE", tile)
    check(Shape(dual_chunk=13, block_size=4, dtype="float64"), LONG)


def test_a_chunk_that_nothing_fills_is_attention_as_usual() -> None:
    plain = Shape(dtype="float64", block_size=4)
    case = make_case(TorchSdpaBackend, plain, STEPS["mixed"], seed=5)
    chunked = make_case(TorchSdpaBackend, replace(plain, dual_chunk=512), STEPS["mixed"], seed=5)
    own = case.q_THD
    other = torch.full_like(own, float("nan"))
    both = replace(chunked, q_THD=torch.cat((own, other, other), 1), k_TKD=case.k_TKD, v_TKV=case.v_TKV)
    both = replace(both, cache=case.cache)
    torch.testing.assert_close(run(TorchSdpaBackend, both), run(TorchSdpaBackend, case), rtol=1e-12, atol=1e-12)


def test_caches_of_few_bits_and_large_scores() -> None:
    shape = Shape(dual_chunk=16, cache_dtype="float8_e4m3fn", block_size=16)
    case = make_case(TorchSdpaBackend, shape, LONG, seed=1)
    torch.testing.assert_close(run(TorchSdpaBackend, case).double(), reference(case), rtol=0.15, atol=0.15)
    case = make_case(TorchSdpaBackend, Shape(dual_chunk=16, dtype="float64"), LONG, seed=1)
    case.q_THD *= 300.0
    torch.testing.assert_close(run(TorchSdpaBackend, case), reference(case), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", [NativeCpuBackend, TritonBackend, FlashAttnBackend])
def test_backends_that_cannot_are_rejected_with_the_reason(backend: type[AttentionBackend]) -> None:
    request = Shape(dual_chunk=16, head_size=64, value_size=64).request()
    reasons = [reason.detail for reason in set_reasons(backend, request)]
    assert "does not declare the feature 'dual_chunk'" in reasons


@pytest.mark.parametrize("other", [{"softcap": 2.0}, {"alibi": True}, {"sinks": True}, {"window": 9}])
def test_what_it_is_not_defined_for_is_refused(other: dict[str, Any]) -> None:
    assert not TorchSdpaBackend.check(Shape(dual_chunk=16).request())
    assert TorchSdpaBackend.check(replace(Shape(dual_chunk=16), **other).request())
