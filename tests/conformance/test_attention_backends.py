"""The conformance cases, run through every backend of the project (and through backends put together)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention import CPU, Case, Query, Shape, copy_cache, make_case, reference, run, with_cache
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.interfaces import HostLengths
from jackfield.layers.composite import Composite, CompositeBuilder
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend


class TwoParts:
    """Prefill and decode by the same backend, put together: an ordinary backend from outside."""

    cache_specs = TorchSdpaBackend.cache_specs
    _parts = Composite(TorchSdpaBackend, TorchSdpaBackend)

    @classmethod
    def metadata_builder(cls, env: Any) -> Any:
        return cls._parts.metadata_builder(env)

    @classmethod
    def layer(cls, env: Any, index: int) -> Any:
        return cls._parts.layer(env, index)


BACKENDS = pytest.mark.parametrize("backend", [TorchSdpaBackend, TwoParts], ids=["torch_sdpa", "two parts"])

shapes = st.builds(
    Shape,
    kv_heads=st.sampled_from([1, 2, 3]),
    ratio=st.sampled_from([1, 2, 4, 7]),
    head_size=st.sampled_from([1, 4, 8, 20]),
    value_size=st.sampled_from([4, 8, 12]),
    block_size=st.integers(1, 64),
    window=st.one_of(st.none(), st.integers(1, 40)),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
)
queries = st.one_of(
    st.builds(Query, st.just(1), st.integers(0, 150)),  # decode
    st.builds(Query, st.integers(2, 8), st.integers(0, 90)),  # verification of drafts
    st.builds(Query, st.integers(1, 70)),  # prefill
    st.builds(Query, st.integers(9, 50), st.integers(1, 80)),  # a chunk after others
)


def check(backend: Any, case: Case, tolerance: float = 1e-5) -> None:
    got = run(backend, case)
    torch.testing.assert_close(got.double(), reference(case), rtol=tolerance, atol=tolerance)


@BACKENDS
@settings(max_examples=120, deadline=None)
@given(shape=shapes, batch=st.lists(queries, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_random_steps(backend: Any, shape: Shape, batch: list[Query], seed: int) -> None:
    check(backend, make_case(backend, shape, batch, seed))


KINDS = {
    "decode": [Query(1, 0), Query(1, 5), Query(1, 16), Query(1, 63)],
    "verification": [Query(3, 10), Query(8, 31), Query(2, 0)],
    "prefill": [Query(9), Query(33), Query(64)],
    "chunks": [Query(20, 12), Query(9, 1), Query(40, 40)],
    "mixed": [Query(1, 30), Query(1, 2), Query(4, 9), Query(8, 8), Query(30), Query(17, 23)],
}


@BACKENDS
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("window", [None, 1, 7, 16])
@pytest.mark.parametrize("block_size", [1, 16])
def test_each_kind_of_step(backend: Any, kind: str, window: int | None, block_size: int) -> None:
    check(backend, make_case(backend, Shape(window=window, block_size=block_size), KINDS[kind]))


@BACKENDS
@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("value_size", [4, 16])
def test_soft_caps_and_value_sizes(backend: Any, softcap: float, value_size: int) -> None:
    check(backend, make_case(backend, Shape(softcap=softcap, value_size=value_size, window=9), KINDS["mixed"]))


@BACKENDS
@settings(max_examples=60, deadline=None)
@given(shape=shapes, batch=st.lists(queries, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_linear_biases(backend: Any, shape: Shape, batch: list[Query], seed: int) -> None:
    check(backend, make_case(backend, replace(shape, alibi=True, softcap=0.0), batch, seed))


def test_soft_caps_and_linear_biases_in_one_layer_are_refused() -> None:
    request = Shape(alibi=True, softcap=2.0).request()
    assert [reason.fact for reason in TorchSdpaBackend.check(request)] == ["softcap"]
    assert not TorchSdpaBackend.check(replace(request, softcap=0.0))


def test_the_kernels_in_c_do_not_claim_linear_biases_and_sinks() -> None:
    assert TorchSdpaBackend.features - NativeCpuBackend.features == {"alibi", "sinks"}


@BACKENDS
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("bfloat16", 4e-2), ("float16", 5e-3)])
def test_other_types(backend: Any, dtype: str, tolerance: float) -> None:
    check(backend, make_case(backend, Shape(dtype=dtype, block_size=8), KINDS["mixed"]), tolerance)


@BACKENDS
def test_large_scores_do_not_overflow(backend: Any) -> None:
    case = make_case(backend, Shape(), KINDS["mixed"])
    case.q_THD *= 300
    check(backend, case, 1e-4)


@BACKENDS
@settings(max_examples=60, deadline=None)
@given(shape=shapes, batch=st.lists(queries, min_size=1, max_size=4), data=st.data())
def test_write_touches_its_slots_and_nothing_else(
    backend: Any, shape: Shape, batch: list[Query], data: st.DataObject
) -> None:
    case = make_case(backend, shape, batch)
    hidden = data.draw(st.sets(st.integers(0, case.step.num_tokens - 1)))
    slots = case.step.slots.clone()
    slots[list(hidden)] = data.draw(st.sampled_from([-1, -5, -shape.block_size - 1]))
    before = copy_cache(case.cache)
    backend.layer(case.env, 0).write(case.k_TKD, case.v_TKV, case.cache, slots)
    for name, new in (("k", case.k_TKD), ("v", case.v_TKV)):
        expected = before[name]
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // shape.block_size, :, slot % shape.block_size] = new[token]
        assert torch.equal(case.cache[name].isnan(), expected.isnan())
        assert torch.equal(case.cache[name].nan_to_num(), expected.nan_to_num())


@settings(max_examples=60, deadline=None)
@given(shape=shapes, batch=st.lists(queries, min_size=1, max_size=6))
def test_two_parts_give_what_one_backend_gives(shape: Shape, batch: list[Query]) -> None:
    case = make_case(TorchSdpaBackend, shape, batch)
    other = with_cache(case, copy_cache(case.cache))
    torch.testing.assert_close(run(TwoParts, case), run(TorchSdpaBackend, other), rtol=1e-6, atol=1e-6)


def test_a_pair_needs_the_more_exact_lengths_of_the_two() -> None:
    env = make_case(TorchSdpaBackend, Shape(), [Query(1)]).env

    class Loose:
        host_lengths = HostLengths.NONE

    exact: Any = TorchSdpaBackend.metadata_builder(env)
    loose: Any = Loose()
    assert CompositeBuilder(loose, exact).host_lengths is HostLengths.EXACT
    assert CompositeBuilder(loose, loose).host_lengths is HostLengths.NONE
    assert env.device == CPU
