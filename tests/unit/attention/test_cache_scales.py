"""Scales of a checkpoint's cache in the torch backends: what is stored, what is read, and who can do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.errors import CheckpointError
from jackfield.interfaces import AttentionBackend, RankInfo
from jackfield.layers.parameters import CacheScales
from jackfield.oracle.judge import set_reasons
from jackfield.testing.attention_cases import STEPS, make_case, reference, run
from jackfield.testing.attention_shapes import LATENT, PHASES, Shape
from jackfield.testing.latent_cases import latent_attention
from jackfield_attention.flash_attn import FlashAttnBackend
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_attention.torch_mla import TorchMlaBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_attention.torch_store import make_store
from jackfield_attention.triton_backend import TritonBackend
from jackfield_attention.triton_mla import TritonMlaBackend

SCALES = {"k": torch.tensor([0.013, 0.37]), "v": torch.tensor([0.0021, 1.9])}


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_stored_is_divided_and_rounded(stored: str, dtype: torch.dtype) -> None:
    kind, generator = getattr(torch, stored), torch.Generator().manual_seed(1)
    store = make_store(stored, dtype, SCALES)
    x = torch.randn(5, 2, 8, generator=generator).to(dtype) * 3
    cache = {"k": torch.zeros(3, 2, 4, 8).to(kind)}
    pages, places = torch.tensor([0, 0, 2, 2, 1]), torch.tensor([1, 3, 0, 1, 2])
    store.write(cache, "k", x, pages, places)
    wide = torch.promote_types(dtype, torch.float32)
    divided = (x.to(wide) / SCALES["k"][:, None]).clamp(-torch.finfo(kind).max, torch.finfo(kind).max).to(kind)
    found = cache["k"].view(torch.uint8)[pages, :, places]
    assert torch.equal(found, divided.view(torch.uint8))
    meaning = (divided.to(wide) * SCALES["k"][:, None]).to(dtype)
    assert torch.equal(store.read(cache, "k", pages)[torch.arange(5), :, places], meaning)
    assert torch.equal(store.pick(cache, "k", pages, places), meaning)


@pytest.mark.parametrize("kind", list(STEPS))
def test_attention_is_that_over_what_the_cache_means(kind: str) -> None:
    shape = Shape(cache_dtype="float8_e4m3fn", dtype="float64", ratio=3)
    case = make_case(TorchSdpaBackend, shape, STEPS[kind], seed=4)
    scaled = replace(case, env=replace(case.env, k_scale=SCALES["k"], v_scale=SCALES["v"]))
    layer: Any = TorchSdpaBackend.layer(scaled.env, 0)
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        places = torch.arange(len(keys))
        slots = case.step.block_table[row].long()[places // 4] * 4 + places % 4
        layer.write(keys, values, case.cache, slots)
    for part, scale in zip((case.keys, case.values), (SCALES["k"], SCALES["v"]), strict=True):
        for index, x in enumerate(part):
            narrow = (x / scale[:, None].double()).clamp(-448, 448).to(torch.float8_e4m3fn)
            part[index] = narrow.double() * scale[:, None].double()
    torch.testing.assert_close(run(TorchSdpaBackend, scaled), reference(case), rtol=1e-6, atol=1e-6)
    plain = run(TorchSdpaBackend, case)
    assert (plain - reference(case)).abs().max() > 0.01, "without the scales the cache means something else"


@pytest.mark.parametrize("kind", ["decode", "chunks"])
def test_latents_have_one_scale(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """With a scale, latents beyond the type's largest number are not cut off."""
    request = replace(LATENT, cache_dtype="float8_e4m3fn", needs=LATENT.needs | {"cache_scales"})
    make = TorchMlaBackend.layer.__func__  # type: ignore[attr-defined]
    errors = {}
    for scale in (1.0, 0.013, 1e-4):
        bound = torch.tensor([scale])

        def layer(cls: Any, env: Any, index: int, bound: torch.Tensor = bound) -> Any:
            return make(cls, replace(env, k_scale=bound), index)

        monkeypatch.setattr(TorchMlaBackend, "layer", classmethod(layer))
        found, wanted = latent_attention(TorchMlaBackend, request, STEPS[kind], torch.device("cpu"))
        errors[scale] = float((found - wanted).abs().max())
    assert errors[0.013] < 2 * errors[1.0] < 10 * errors[1e-4]


def asked(**values: Any) -> Any:
    plain = Shape(cache_dtype="float8_e4m3fn", dtype="bfloat16", head_size=64, value_size=64).request()
    return replace(plain, needs=plain.needs | {"cache_scales"}, **values)


@pytest.mark.parametrize("backend", [NativeCpuBackend, FlashAttnBackend, TritonMlaBackend])
def test_backends_that_cannot_are_rejected_with_the_reason(backend: type[AttentionBackend]) -> None:
    kind = "mla" if backend is TritonMlaBackend else "full"
    details = [reason.detail for reason in set_reasons(backend, asked(kind=kind))]
    assert "does not declare the feature 'cache_scales'" in details


@pytest.mark.parametrize("backend", [TorchSdpaBackend, TritonBackend])
def test_backends_that_can_say_so(backend: type[AttentionBackend]) -> None:
    assert PHASES | {"cache_scales"} <= backend.features
    assert not set_reasons(backend, asked())


@pytest.mark.parametrize(
    ("tensor", "rank", "mine"),
    [
        (torch.tensor(0.5), RankInfo(1, 2), [0.5, 0.5]),
        (torch.tensor([0.5]), RankInfo(), [0.5] * 4),
        (torch.tensor([0.1, 0.2, 0.3, 0.4]).view(4, 1, 1), RankInfo(1, 2), [0.3, 0.4]),
        (torch.tensor([0.1, 0.2, 0.3, 0.4]), RankInfo(5, 8), [0.3]),
    ],
)
def test_one_scale_for_all_heads_or_one_for_each(tensor: torch.Tensor, rank: RankInfo, mine: list[float]) -> None:
    scales = CacheScales("layers.0.cache_scales", 4, rank, torch.device("cpu"))
    assert not scales.unfilled() and bool((scales.k_scale == 1).all())
    assert scales.load("", "k_scale", tensor.bfloat16())
    torch.testing.assert_close(scales.k_scale, torch.tensor(mine), rtol=1e-2, atol=0)
    assert bool((scales.v_scale == 1).all()) and not scales.load("", "weight", tensor)


@pytest.mark.parametrize("wrong", [[0.0], [-1.0], [float("nan")], [float("inf")], [0.1, 0.2]])
def test_scales_that_mean_nothing_are_errors(wrong: list[float]) -> None:
    scales = CacheScales("layers.0.cache_scales", 4, RankInfo(), torch.device("cpu"))
    with pytest.raises(CheckpointError):
        scales.load("", "v_scale", torch.tensor(wrong))
