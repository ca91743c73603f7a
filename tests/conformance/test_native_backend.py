"""``native_cpu`` beyond the kit: odd sizes and blocks, threads, ``prepare``, and planes inside shared pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.interfaces import AttentionRequest, Band, DeviceFacts
from jackfield.layers.functional import rms_norm, rotary
from jackfield.testing.attention_cases import CPU, STEPS, Query, copy_cache, make_case, reference, run, with_cache
from jackfield.testing.attention_shapes import Shape
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend

KINDS = {**STEPS, "decode": [*STEPS["decode"], Query(1, 300)]}
shapes = st.builds(
    Shape,
    kv_heads=st.sampled_from([1, 2, 3]),
    ratio=st.sampled_from([1, 2, 4, 7]),
    head_size=st.sampled_from([1, 4, 8, 20, 64, 80]),
    value_size=st.sampled_from([4, 8, 12, 64, 100]),
    block_size=st.integers(1, 100),
    window=st.one_of(st.none(), st.integers(1, 40)),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
)
queries = st.one_of(
    st.builds(Query, st.just(1), st.integers(0, 250)),
    st.builds(Query, st.integers(2, 8), st.integers(0, 90)),
    st.builds(Query, st.integers(1, 70)),
    st.builds(Query, st.integers(9, 50), st.integers(1, 80)),
)


def check(shape: Shape, batch: Sequence[Query], seed: int = 0, factor: float = 1.0) -> None:
    case = make_case(NativeCpuBackend, shape, batch, seed)
    case.q_THD *= factor
    tolerance = 1e-5 if factor == 1 else 1e-4
    torch.testing.assert_close(run(NativeCpuBackend, case).double(), reference(case), rtol=tolerance, atol=tolerance)


@settings(max_examples=30, deadline=None)
@given(shape=shapes, batch=st.lists(queries, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_random_steps(shape: Shape, batch: list[Query], seed: int) -> None:
    check(shape, batch, seed)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("block_size", [1, 128])
def test_each_kind_of_step(kind: str, window: int | None, block_size: int) -> None:
    check(Shape(window=window, block_size=block_size), KINDS[kind])


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize(("head_size", "value_size"), [(8, 4), (8, 16), (512, 512), (33, 47)])
def test_soft_caps_and_sizes(softcap: float, head_size: int, value_size: int) -> None:
    shape = Shape(softcap=softcap, head_size=head_size, value_size=value_size, window=9)
    check(shape, KINDS["mixed"])


def test_large_scores_do_not_overflow() -> None:
    check(Shape(), KINDS["mixed"], factor=300)


@pytest.mark.parametrize("team", [1, 2])
def test_threads_and_batch_mates_change_nothing(team: int) -> None:
    before = torch.get_num_threads()
    case = make_case(NativeCpuBackend, Shape(kv_heads=3, ratio=3, head_size=64, value_size=64), KINDS["decode"])
    torch.set_num_threads(team)
    try:
        together = run(NativeCpuBackend, with_cache(case, copy_cache(case.cache)))
    finally:
        torch.set_num_threads(before)
    layer, builder = NativeCpuBackend.layer(case.env, 0), NativeCpuBackend.metadata_builder(case.env)
    layer.write(case.k_TKD, case.v_TKV, case.cache, case.step.slots)
    for row in range(5):
        step = replace(
            case.step,
            num_sequences=1,
            max_query=1,
            lengths=case.step.lengths[row : row + 1],
            lengths_host=case.step.lengths_host[row : row + 1],  # type: ignore[index]  # the case has them
            block_table=case.step.block_table[row : row + 1],
        )
        out = torch.empty(1, 9, 64)
        layer.attend(case.q_THD[row : row + 1], case.cache, builder.build(step), out)
        assert torch.equal(out[0], together[row])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotated", [0, 6, 20])
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_prepare_is_norm_rotation_and_write(normed: bool, rotated: int, tokens: int) -> None:
    shape = Shape(head_size=20, value_size=12, block_size=8)
    case = make_case(NativeCpuBackend, shape, [Query(tokens)])
    layer = NativeCpuBackend.layer(case.env, 0)
    wide = torch.randn(tokens, 150)
    qkv = wide[:, : 6 * 20 + 2 * 12]
    angles = torch.randn(tokens, max(1, rotated // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1) if rotated else None
    weights = (torch.randn(20), torch.randn(20)) if normed else (None, None)
    slots = case.step.slots.clone()
    slots[tokens // 2] = -1
    qk, values = qkv[:, :120].reshape(tokens, 6, 20).clone(), qkv[:, 120:].reshape(tokens, 2, 12).clone()
    if weights[0] is not None and weights[1] is not None:
        qk = torch.cat((rms_norm(qk[:, :4], weights[0], 1e-5), rms_norm(qk[:, 4:], weights[1], 1e-5)), 1)
    if cos_sin is not None:
        rotary(qk, cos_sin)
    expected, rest = copy_cache(case.cache), wide[:, 144:].clone()
    TorchSdpaBackend.layer(case.env, 0).write(qk[:, 4:], values, expected, slots)
    layer.prepare(qkv, cos_sin, weights[0], weights[1], 1e-5, case.cache, slots)
    torch.testing.assert_close(qkv[:, :80].view(tokens, 4, 20), qk[:, :4], rtol=3e-6, atol=3e-6)
    for name in ("k", "v"):
        torch.testing.assert_close(case.cache[name], expected[name], rtol=3e-6, atol=3e-6, equal_nan=True)
    assert torch.equal(wide[:, 144:], rest)


def test_planes_inside_shared_pages() -> None:
    case = make_case(NativeCpuBackend, Shape(block_size=16), KINDS["mixed"])
    pages = len(case.cache["k"])
    raw = torch.full((pages, 3, 2, 16, 8), float("nan"))
    raw[:, 0], raw[:, 2] = case.cache["k"], case.cache["v"]
    inside = with_cache(case, {"k": raw[:, 0], "v": raw[:, 2]})
    torch.testing.assert_close(run(NativeCpuBackend, inside).double(), reference(case), rtol=1e-5, atol=1e-5)
    assert raw[:, 1].isnan().all()


def test_declaration() -> None:
    assert NativeCpuBackend.prepares and NativeCpuBackend.dtypes == {"float32"}
    request = AttentionRequest(
        kind="full", dtype="float32", head_size=513, value_head_size=600, device=DeviceFacts("cpu")
    )
    found = NativeCpuBackend.check(replace(request, cache_dtype="float8_e4m3fn"))
    assert [(reason.code, reason.detail) for reason in found] == [
        ("cache_dtype", "float8_e4m3fn differs from the computation type float32"),
        ("head_size", "513 is above 512"),
        ("value_head_size", "600 is above 512"),
    ]
    preference = NativeCpuBackend.preference(request)
    assert (preference.band, preference.why) == (Band.GOOD, "one call for all short queries of a step")
    assert NativeCpuBackend.cache_specs(request) == TorchSdpaBackend.cache_specs(request)
    assert CPU.type in NativeCpuBackend.device_types
