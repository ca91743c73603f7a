"""What the Triton attention backends declare, reject and choose; no kernel is needed for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.interfaces import AttentionBackend, AttentionEnv, AttentionRequest, DeviceFacts, RankInfo, intersect
from jackfield.interfaces.plugin import Settings
from jackfield_attention.flash_attn import FlashAttnBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_attention.triton_backend import TritonBackend
from jackfield_attention.triton_mla import TritonMlaBackend
from jackfield_attention.triton_tuning import DecodePlan, KernelShape, decode_plan, decode_shape, prefill_shape

REQUEST = AttentionRequest(
    kind="full",
    dtype="bfloat16",
    device=DeviceFacts("cuda", capability=(9, 0), cores=132),
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
)


def env_of(request: AttentionRequest = REQUEST, **settings: int) -> AttentionEnv:
    """Return what a layer of a request is built with."""
    return AttentionEnv(request, TritonBackend.cache_specs(request)[0], 64, torch.device("cpu"), Settings(settings))


REJECTED: dict[tuple[str, str], dict[str, Any]] = {
    ("capability", "7.5 is below 8.0"): {"device": DeviceFacts("cuda", capability=(7, 5))},
    ("head_size", "512 is not between 16 and 256"): {"head_size": 512},
    ("head_size", "8 is not between 16 and 256"): {"head_size": 8},
    ("value_head_size", "64 differs from the key's 128"): {"value_head_size": 64},
    ("cache_dtype", "int8 differs from the computation type bfloat16"): {"cache_dtype": "int8"},
    ("group", "128 query heads on 1 cache heads are more than 64 to one"): {"num_heads": 128, "num_kv_heads": 1},
}


@pytest.mark.parametrize("backend", [TritonBackend, FlashAttnBackend], ids=lambda b: b.name)
@pytest.mark.parametrize("reason", REJECTED)
def test_limits(backend: type[AttentionBackend], reason: tuple[str, str]) -> None:
    assert not backend.check(REQUEST)
    found = backend.check(replace(REQUEST, **REJECTED[reason]))
    assert [(r.code, r.detail) for r in found] == [reason]


def test_narrow_floats_are_read_by_triton_alone_and_from_8_9_on() -> None:
    narrow = replace(REQUEST, cache_dtype="float8_e4m3fn")
    assert not TritonBackend.check(narrow)
    assert [r.code for r in FlashAttnBackend.check(narrow)] == ["cache_dtype"]
    older = replace(narrow, device=DeviceFacts("cuda", capability=(8, 0)))
    assert [r.detail for r in TritonBackend.check(older)] == ["8-bit floats need capability 8.9, not 8.0"]


def test_narrow_latents_are_read_from_8_9_on() -> None:
    latents = replace(REQUEST, kind="mla", cache_dtype="float8_e4m3fn")
    assert not TritonMlaBackend.check(latents)
    older = replace(latents, device=DeviceFacts("cuda", capability=(8, 0)))
    assert [r.detail for r in TritonMlaBackend.check(older)] == ["8-bit floats need capability 8.9, not 8.0"]


def test_flash_attention_wants_multiples_of_eight() -> None:
    odd = replace(REQUEST, head_size=100)
    assert [r.detail for r in FlashAttnBackend.check(odd)] == ["100 is not a multiple of 8"]
    assert not TritonBackend.check(odd)


def test_one_cache_serves_all_three_backends() -> None:
    request = replace(REQUEST, rank=RankInfo(1, 4))
    ours, flash, sdpa = (b.cache_specs(request) for b in (TritonBackend, FlashAttnBackend, TorchSdpaBackend))
    shared = intersect(ours, sdpa)
    assert shared is not None
    assert shared == intersect(flash, sdpa) == ours[0]
    assert [plane.page_shape(64) for plane in shared.planes] == [(2, 64, 128)] * 2


@pytest.mark.parametrize(
    ("sequences", "max_query", "max_length", "plan"),
    [
        (1, 1, 100_000, DecodePlan(1, 16, 33)),
        (1, 1, 300, DecodePlan(1, 16, 5)),
        (16, 1, 100_000, DecodePlan(1, 16, 2)),
        (64, 1, 100_000, DecodePlan(1, 16, 1)),
        (256, 1, 100_000, DecodePlan(1, 16, 1)),
        (0, 1, 100_000, DecodePlan(1, 16, 64)),
        (4, 5, 100_000, DecodePlan(8, 32, 4)),
    ],
)
def test_splits_fill_the_device(sequences: int, max_query: int, max_length: int, plan: DecodePlan) -> None:
    assert decode_plan(env_of(), sequences, max_query, max_length) == plan


def test_options_overrule() -> None:
    env = env_of(decode_splits=3, decode_tile=32, prefill_rows=64, prefill_warps=4)
    assert decode_plan(env, 1, 1, 100_000).splits == 3
    assert decode_shape(env) == replace(decode_shape(env_of()), tile=32)
    assert prefill_shape(env) == replace(prefill_shape(env_of()), rows=64, warps=4)


def test_small_shared_memory_gets_small_tiles() -> None:
    small = replace(REQUEST, device=DeviceFacts("cuda", capability=(8, 9), cores=128))
    assert prefill_shape(env_of(small)) == KernelShape(64, 32, 4, 2)
    assert decode_shape(env_of(small)) == KernelShape(0, 32, 4, 2)


def test_a_tile_holds_all_heads_of_a_token() -> None:
    small = DeviceFacts("cuda", capability=(8, 9), cores=128)
    request = replace(REQUEST, dtype="float32", device=small, num_heads=48, num_kv_heads=1)
    assert prefill_shape(env_of(request)).rows == 64
