"""Attention kernels on the device, in 16 bits, against brute force in float64; graphs against plain launches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from paged_case import TOLERANCE, Case, Shape, attend, attended, error, expected, limits_of, make_case, request_of
from recording import record

from jackfield.interfaces import AttentionBackend
from jackfield_attention.flash_attn import FlashAttnBackend
from jackfield_attention.flashinfer import FlashInferBackend, is_compiled
from jackfield_attention.triton_backend import TritonBackend
from jackfield_platforms.cuda_device import CudaGraphs

pytestmark = pytest.mark.gpu

BACKENDS: list[type[AttentionBackend]] = [TritonBackend, FlashAttnBackend]
SHAPES = {
    "decode": Shape([1] * 5, [1, 63, 64, 900, 2000], 32, 8, 128, 64),
    "decode, small blocks": Shape([1] * 3, [5, 900, 2000], 32, 8, 128, 16),
    "decode, group of seven": Shape([1] * 3, [5, 900, 2000], 14, 2, 64, 64),
    "decode in a window": Shape([1] * 3, [5, 900, 2000], 16, 4, 128, 64, window=300),
    "head size 256": Shape([1, 1, 150], [5, 900, 400], 8, 4, 256, 64),
    "head size 80": Shape([1, 1, 150], [5, 900, 400], 8, 4, 80, 16),
    "prefill": Shape([700, 33], [700, 33], 32, 8, 128, 64),
    "chunks": Shape([300, 200], [900, 260], 16, 8, 128, 16),
    "prefill in a window": Shape([700, 100], [700, 500], 8, 8, 64, 64, window=130),
    "mixed": Shape([1, 1, 1, 200, 50], [700, 64, 3, 500, 50], 32, 8, 128, 64),
    "drafts": Shape([4] * 3, [700, 64, 130], 32, 8, 128, 64),
}
TRITON_ONLY = {
    "softcap": Shape([1, 1, 150], [5, 900, 400], 8, 4, 128, 64, softcap=5.0),
    "sinks": Shape([1, 1, 150], [5, 900, 400], 8, 1, 64, 64, sinks=True),
    "narrow cache": Shape([1, 1, 150], [5, 900, 400], 8, 4, 128, 64, stored="float8_e4m3fn"),
    "scales": Shape([1, 1, 150], [5, 900, 400], 8, 4, 128, 64, stored="float8_e4m3fn", scaled=True),
    "tokens outside heads": Shape([1, 1, 150], [5, 900, 400], 8, 4, 128, 16, layout=1),
}


def on_device(shape: Shape, dtype: str) -> Shape:
    """Return the shape for the device, with its number of multiprocessors."""
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    return replace(shape, dtype=dtype, device="cuda", cores=cores)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_against_brute_force(backend: type[AttentionBackend], name: str, dtype: str) -> None:
    case = make_case(backend, on_device(SHAPES[name], dtype))
    assert error(attended(backend, case), expected(case)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["decode", "prefill", "chunks", "mixed"])
def test_prompts_by_flashinfer(name: str) -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed here")
    shape = on_device(SHAPES[name], "bfloat16")
    if not is_compiled(request_of(shape)):
        pytest.skip("FlashInfer's kernels are not compiled here, which takes minutes")
    case = make_case(FlashInferBackend, shape)
    assert error(attended(FlashInferBackend, case), expected(case)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("name", TRITON_ONLY)
def test_triton_alone(name: str) -> None:
    case = make_case(TritonBackend, on_device(TRITON_ONLY[name], "bfloat16"))
    assert error(attended(TritonBackend, case), expected(case)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("way", ["write", "prepare"])
def test_what_is_stored_is_divided_by_the_scale_to_the_bit(way: str) -> None:
    shape = Shape([1, 1, 150], [5, 900, 400], 8, 4, 128, 64, stored="float8_e4m3fn", scaled=True)
    case = make_case(TritonBackend, on_device(shape, "bfloat16"))
    case.qkv *= 20.0
    k, v = case.qkv.view(len(case.qkv), -1, 128)[:, 8:].clone().chunk(2, 1)
    layer, slots = TritonBackend.layer(case.env, 0), case.step.slots
    if way == "write":
        layer.write(k, v, case.cache, slots)
    else:
        layer.prepare(case.qkv, None, None, None, 0.0, case.cache, slots)
    for name, x, scale in (("k", k, case.env.k_scale), ("v", v, case.env.v_scale)):
        assert scale is not None
        wanted = (x.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        found = case.cache[name].view(torch.uint8).transpose(1, 2).flatten(0, 1)[slots]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["decode", "prefill", "mixed"])
def test_float32_is_near_exact(name: str) -> None:
    case = make_case(TritonBackend, on_device(SHAPES[name], "float32"))
    assert error(attended(TritonBackend, case), expected(case)) < 1e-5


def test_the_same_result_on_every_launch() -> None:
    """Splits arrive in any order; they are put together in one."""
    case = make_case(TritonBackend, on_device(Shape([1] * 3, [5, 3000, 4000], 32, 8, 128, 64), "bfloat16"))
    builder = TritonBackend.metadata_builder(case.env)
    builder.allocate(limits_of(case))
    layer, metadata = TritonBackend.layer(case.env, 0), builder.build(case.step)
    assert metadata.plan.splits > 1
    first = attend(layer, case, metadata)
    assert all(torch.equal(first, attend(layer, case, metadata)) for _ in range(50))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_a_replayed_decode_equals_a_launched_one(backend: type[AttentionBackend]) -> None:
    case = make_case(backend, on_device(SHAPES["decode"], "bfloat16"))
    builder = backend.metadata_builder(case.env)
    builder.allocate(limits_of(case))
    layer = backend.layer(case.env, 0)
    wanted = attend(layer, case, builder.build(case.step))
    out = torch.full_like(wanted, float("nan"))
    graphs = CudaGraphs()
    recorded = builder.capture(len(case.shape.counts), 1)
    graph = record(graphs, lambda: layer.attend(case.q, case.cache, recorded, out))
    builder.build(case.step)
    graphs.replay(graph)
    assert torch.equal(out, wanted)
    assert error(out, expected(case)) < TOLERANCE["bfloat16"]


def test_build_can_run_inside_a_capture_and_follows_the_step() -> None:
    case = make_case(TritonBackend, on_device(Shape([1] * 2, [900, 1000], 8, 2, 128, 64), "bfloat16"))
    builder = TritonBackend.metadata_builder(case.env)
    builder.allocate(limits_of(case))
    layer = TritonBackend.layer(case.env, 0)
    out = attend(layer, case, builder.build(case.step))
    work = partial(_build_and_attend, layer, builder, case, out)
    graphs = CudaGraphs()
    graph = record(graphs, work)
    lengths = [20, 970]
    case.step.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
    graphs.replay(graph)
    k, v = ([part[:n] for part, n in zip(parts, lengths, strict=True)] for parts in (case.k, case.v))
    wanted = expected(replace(case, shape=replace(case.shape, lengths=lengths), k=k, v=v))
    assert error(out, wanted) < TOLERANCE["bfloat16"]


def _build_and_attend(layer: Any, builder: Any, case: Case, out: torch.Tensor) -> None:
    layer.attend(case.q, case.cache, builder.build(case.step), out)


def test_building_a_decode_step_allocates_nothing() -> None:
    case = make_case(TritonBackend, on_device(SHAPES["decode"], "bfloat16"))
    builder = TritonBackend.metadata_builder(case.env)
    builder.allocate(limits_of(case))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    builder.build(case.step)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
