"""Prefill by one backend and decode by another, put together: an ordinary backend from outside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.interfaces import HostLengths
from jackfield.layers.composite import Composite, CompositeBuilder
from jackfield.testing.attention import QUERIES, SHAPES
from jackfield.testing.attention_cases import CPU, STEPS, Query, copy_cache, make_case, reference, run, with_cache
from jackfield.testing.attention_shapes import Shape
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_native.toolchain import unavailable


class Parts:
    """Two backends that share a layout."""

    cache_specs = TorchSdpaBackend.cache_specs

    def __init__(self, prefill: Any, decode: Any) -> None:
        self._parts = Composite(prefill, decode)

    def metadata_builder(self, env: Any) -> Any:
        return self._parts.metadata_builder(env)

    def layer(self, env: Any, index: int) -> Any:
        return self._parts.layer(env, index)


PAIRS = {"one twice": Parts(TorchSdpaBackend, TorchSdpaBackend), "two": Parts(TorchSdpaBackend, NativeCpuBackend)}
if unavailable():
    del PAIRS["two"]


@pytest.mark.parametrize("pair", list(PAIRS))
@pytest.mark.parametrize("kind", list(STEPS))
@pytest.mark.parametrize("window", [None, 7])
def test_two_parts_compute_the_reference(pair: str, kind: str, window: int | None) -> None:
    case = make_case(PAIRS[pair], Shape(window=window, block_size=16), STEPS[kind])
    torch.testing.assert_close(run(PAIRS[pair], case).double(), reference(case), rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, batch=st.lists(QUERIES, min_size=1, max_size=6))
def test_two_parts_give_what_one_backend_gives(shape: Shape, batch: list[Query]) -> None:
    case = make_case(TorchSdpaBackend, shape, batch)
    other = with_cache(case, copy_cache(case.cache))
    torch.testing.assert_close(run(PAIRS["one twice"], case), run(TorchSdpaBackend, other), rtol=1e-6, atol=1e-6)


def test_a_pair_needs_the_more_exact_lengths_of_the_two() -> None:
    env = make_case(TorchSdpaBackend, Shape(), [Query(1)]).env

    class Loose:
        host_lengths = HostLengths.NONE

    exact: Any = TorchSdpaBackend.metadata_builder(env)
    loose: Any = Loose()
    assert CompositeBuilder(loose, exact).host_lengths is HostLengths.EXACT
    assert CompositeBuilder(loose, loose).host_lengths is HostLengths.NONE
    assert env.device == CPU


def test_soft_caps_and_linear_biases_in_one_layer_are_refused() -> None:
    request = Shape(alibi=True, softcap=2.0).request()
    assert [reason.fact for reason in TorchSdpaBackend.check(request)] == ["softcap"]
    assert not TorchSdpaBackend.check(replace(request, softcap=0.0))


def test_the_kernels_in_c_do_not_claim_linear_biases_and_sinks() -> None:
    assert TorchSdpaBackend.features - NativeCpuBackend.features == {"alibi", "sinks", "dual_chunk", "cache_scales"}
