"""Latent attention in Triton against its definition, and against the torch reference where types are narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.interfaces import AttentionEnv, AttentionRequest, DeviceFacts, StepLimits
from jackfield.interfaces.plugin import Settings
from jackfield.testing.attention_cases import Query
from jackfield.testing.latent_cases import latent_attention
from jackfield_attention.torch_mla import TorchMlaBackend
from jackfield_attention.torch_mla_layer import MlaLayer
from jackfield_attention.triton_mla import TritonMlaBackend
from jackfield_attention.triton_mla_layer import TritonMlaLayer
from jackfield_attention.triton_mla_metadata import TritonMlaMetadataBuilder, decode_shape
from jackfield_triton import launch

DEVICE = torch.device("cpu")
REQUEST = AttentionRequest(
    kind="mla",
    dtype="float32",
    device=DeviceFacts("cuda", capability=(9, 0), cores=4),
    num_heads=4,
    num_kv_heads=1,
    head_size=32,
    value_head_size=24,
    scale=32**-0.5,
    extra={"latent_size": 32, "rope_size": 8},
)
STEPS: dict[str, list[Query]] = {
    "one token": [Query(1, 0)],
    "decodes": [Query(1, 20), Query(1, 3), Query(1, 70), Query(1, 33)],
    "long ones": [Query(9, 0), Query(30, 17)],
    "mixed": [Query(1, 41), Query(1, 0), Query(5, 12), Query(2, 30)],
}
SIZES = {
    "as given": REQUEST,
    "many heads": replace(REQUEST, num_heads=20),
    "odd sizes": replace(REQUEST, head_size=30, value_head_size=18, extra={"latent_size": 40, "rope_size": 6}),
}


def with_options(**options: int) -> type[TritonMlaBackend]:
    """Return the backend with other defaults of its options."""
    changed = {
        name: replace(option, default=options.get(name, option.default))
        for name, option in TritonMlaBackend.options.items()
    }
    return type("Changed", (TritonMlaBackend,), {"options": changed})


def check(backend: Any, request: AttentionRequest, queries: Sequence[Query], block: int = 4) -> None:
    found, wanted = latent_attention(backend, request, queries, DEVICE, block=block)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-5


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("size", SIZES)
def test_it_equals_the_definition(size: str, step: str) -> None:
    check(TritonMlaBackend, SIZES[size], STEPS[step])


@pytest.mark.parametrize("splits", [1, 3, 7])
@pytest.mark.parametrize("context", [4, 4096])
def test_parts_come_together(splits: int, context: int) -> None:
    backend = with_options(decode_splits=splits, decode_tile=16, context_part=context)
    check(backend, REQUEST, [Query(1, 90), Query(1, 2), Query(12, 40)])


@pytest.mark.parametrize("block", [8, 16, 32])
@pytest.mark.parametrize("splits", [1, 3])
def test_pages_hold_parts_of_tiles_or_whole_ones(splits: int, block: int) -> None:
    backend = with_options(decode_splits=splits, decode_tile=16)
    check(backend, REQUEST, [Query(1, 90), Query(1, 31), Query(1, 0), Query(1, 15)], block)


def test_a_program_takes_some_heads() -> None:
    check(with_options(decode_heads=32), replace(REQUEST, num_heads=40), STEPS["decodes"])


class WrittenByTorch(TritonMlaLayer):
    """Stores as torch does: the interpreter cuts numbers off where devices round them."""

    write = MlaLayer.write


@pytest.mark.parametrize("step", ["decodes", "mixed"])
def test_narrow_latents_are_read_as_the_reference_reads_them(step: str) -> None:
    backend = type("Narrow", (TritonMlaBackend,), {"layer": classmethod(lambda cls, env, index: WrittenByTorch(env))})
    narrow = replace(REQUEST, cache_dtype="float8_e4m3fn")
    found, wanted = (latent_attention(one, narrow, STEPS[step], DEVICE)[0] for one in (backend, TorchMlaBackend))
    assert float((found - wanted).norm() / wanted.norm()) < 2e-5


def env_of(request: AttentionRequest, block: int = 4, **options: int) -> AttentionEnv:
    values = {name: option.default for name, option in TritonMlaBackend.options.items()}
    return AttentionEnv(
        request, TritonMlaBackend.cache_specs(request)[0], block, DEVICE, Settings({**values, **options})
    )


def test_a_recorded_step_reads_what_the_next_one_brings() -> None:
    builder = TritonMlaMetadataBuilder(env_of(REQUEST))
    builder.allocate(StepLimits(4, 4, 8, 32))
    recorded = builder.capture(3, 1)
    with pytest.raises(NotImplementedError, match="single tokens"):
        builder.capture(3, 2)
    assert recorded.lengths.tolist() == [0, 0, 0] and recorded.block_table.shape == (3, 8)


LARGE = replace(
    REQUEST,
    dtype="bfloat16",
    num_heads=128,
    head_size=192,
    value_head_size=128,
    extra={"latent_size": 512, "rope_size": 64},
)
OTHERS: dict[str, tuple[AttentionRequest, int, dict[str, int]]] = {
    "another device": (replace(LARGE, device=DeviceFacts("cuda", capability=(10, 0), cores=4)), 64, {}),
    "wide numbers": (replace(LARGE, dtype="float32"), 64, {}),
    "narrow latents": (replace(LARGE, cache_dtype="float8_e4m3fn"), 64, {}),
    "small pages": (LARGE, 32, {}),
    "odd sizes": (replace(LARGE, extra={"latent_size": 384, "rope_size": 64}), 64, {}),
    "as options say": (LARGE, 64, {"decode_tile": 32}),
}


def test_tiles_are_for_usual_sizes_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for heads, rows, warps in ((128, 64, 8), (17, 64, 8), (16, 16, 4), (5, 16, 4)):
        found = decode_shape(env_of(replace(LARGE, num_heads=heads), 64))
        assert found.tiled and (found.heads, found.tile, found.warps, found.programs) == (rows, 64, warps, 1)
    assert decode_shape(env_of(replace(LARGE, dtype="float16"), 128)).tiled
    for name, (request, block, options) in OTHERS.items():
        assert not decode_shape(env_of(request, block, **options)).tiled, name
    monkeypatch.setattr(launch, "version", lambda name: "3.5.1")
    assert not decode_shape(env_of(LARGE, 64)).tiled


def test_old_devices_and_unknown_types_are_refused() -> None:
    old = replace(REQUEST, device=DeviceFacts("cuda", capability=(7, 5)), cache_dtype="int8")
    assert [reason.code for reason in TritonMlaBackend.check(old)] == ["capability", "cache_dtype"]
    assert not TritonMlaBackend.check(replace(REQUEST, cache_dtype="float8_e4m3fn"))
