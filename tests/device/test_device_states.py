"""Latent attention and layers with states on the device: by definition, with narrow latents, and in graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ssd_case import BOUND, SHAPES, Ssd, convolved, draw, mixed, worst

from jackfield.interfaces import AttentionRequest, DeviceFacts
from jackfield.testing.attention_cases import Query
from jackfield.testing.attention_shapes import STATE_SHAPES
from jackfield.testing.latent_cases import latent_attention
from jackfield.testing.state_cases import definition, make_inputs, run_states
from jackfield_attention import triton_ssd
from jackfield_attention.torch_mamba import TorchMambaBackend
from jackfield_attention.torch_mla import TorchMlaBackend
from jackfield_attention.torch_mla_sparse import TorchMlaSparseBackend
from jackfield_attention.triton_mla import TritonMlaBackend
from jackfield_attention.triton_mla_sparse import TritonMlaSparseBackend
from jackfield_attention.triton_states import TritonStatesBackend

pytestmark = pytest.mark.gpu
DEEPSEEK = AttentionRequest(
    kind="mla",
    dtype="float32",
    device=DeviceFacts("cuda", capability=(9, 0), cores=132),
    num_heads=16,
    num_kv_heads=1,
    head_size=192,
    value_head_size=128,
    scale=192**-0.5,
    extra={"latent_size": 512, "rope_size": 64},
)
STEPS = {
    "decodes": [Query(1, 20), Query(1, 900), Query(1, 70)],
    "mixed": [Query(1, 411), Query(1, 0), Query(50, 120), Query(2, 30)],
    "many decodes": [Query(1, 7 * index % 300) for index in range(140)] + [Query(1, 63), Query(1, 64), Query(1, 255)],
}


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu() - wanted.cpu()).norm() / wanted.cpu().norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize("block", [4, 64])
def test_latents_equal_the_definition(block: int, step: str, heads: int, dtype: str) -> None:
    request = replace(DEEPSEEK, num_heads=heads, dtype=dtype)
    found, wanted = latent_attention(TritonMlaBackend, request, STEPS[step], torch.device("cuda"), block=block)
    assert error(found, wanted) < (1e-4 if dtype == "float32" else 1e-2)


def test_narrow_latents_are_those_of_the_reference() -> None:
    narrow, device = replace(DEEPSEEK, cache_dtype="float8_e4m3fn"), torch.device("cuda")
    found, wanted = (
        latent_attention(b, narrow, STEPS["decodes"], device)[0] for b in (TritonMlaBackend, TorchMlaBackend)
    )
    assert error(found, wanted) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "latent"), [(64, 512), (100, 512), (128, 256)])
def test_tiles_of_latents_equal_the_definition(heads: int, latent: int, dtype: str) -> None:
    extra = {"latent_size": latent, "rope_size": 64}
    request = replace(DEEPSEEK, num_heads=heads, dtype=dtype, extra=extra)
    for step in ("decodes", "many decodes"):
        found, wanted = latent_attention(TritonMlaBackend, request, STEPS[step], torch.device("cuda"), block=128)
        assert error(found, wanted) < 1e-2


@pytest.mark.parametrize("step", ["decodes", "mixed"])
@pytest.mark.parametrize("topk", [64, 2048])
@pytest.mark.parametrize("backend", [TorchMlaSparseBackend, TritonMlaSparseBackend])
def test_chosen_latents_equal_the_definition(backend: Any, topk: int, step: str) -> None:
    index = {"index_heads": 64, "index_size": 128, "index_topk": topk}
    request = replace(DEEPSEEK, kind="mla_sparse", extra={**DEEPSEEK.extra, **index})
    assert error(*latent_attention(backend, request, STEPS[step], torch.device("cuda"))) < 1e-4


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", list(STATE_SHAPES))
def test_states_equal_the_definition(kind: str, in_place: bool) -> None:
    inputs = make_inputs(kind, (70, 9, 2), seed=3)
    cuts = [[60, 61, 62], [1, 2, 3, 4], []]
    found = run_states(TritonStatesBackend, kind, inputs, cuts, torch.device("cuda"), in_place=in_place)
    for rows, tokens in zip(found, inputs.sequences, strict=True):
        assert error(rows, definition(kind, tokens, inputs.constants)) < 1e-4


CHUNKS = {
    **SHAPES,
    "Mamba-2 2.7B": Ssd(heads=80, lengths=(1, 700, 1300, 33)),
    "a long prompt": Ssd(heads=24, lengths=(9000,)),
    "many prompts": Ssd(heads=16, groups=4, lengths=tuple(range(1, 60))),
    "large pieces": Ssd(heads=16, lengths=(1000, 600), cut=257, in_place=True),
}


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_equal_the_reference(name: str, dtype: str) -> None:
    shape = replace(CHUNKS[name], dtype=dtype)
    drawn = draw(shape)
    wanted = mixed(TorchMambaBackend, shape.whole(), drawn.wide(), torch.device("cpu"))
    bound = max(BOUND[dtype], 1e-4)
    assert worst(mixed(TritonStatesBackend, shape, drawn, torch.device("cuda")), wanted) < bound


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("name", [name for name, shape in CHUNKS.items() if shape.keys <= triton_ssd.MOST_WALK_KEYS])
def test_walks_that_write_outputs_equal_the_reference(name: str, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"WALKS_PER_CORE": 0, "WALK_WARPS": warps, "WALK_STAGES": 2 if warps == 4 else 3}
    for constant, value in values.items():
        monkeypatch.setattr(triton_ssd, constant, value)
    shape = replace(CHUNKS[name], dtype="bfloat16")
    drawn = draw(shape)
    wanted = mixed(TorchMambaBackend, shape.whole(), drawn.wide(), torch.device("cpu"))
    assert worst(mixed(TritonStatesBackend, shape, drawn, torch.device("cuda")), wanted) < BOUND["bfloat16"]


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("name", ["odd sizes", "in place", "cut after 7", "token by token", "pairs", "Mamba-2 2.7B"])
def test_convolutions_equal_the_reference(name: str, dtype: str) -> None:
    shape = replace(CHUNKS[name], dtype=dtype)
    drawn = draw(shape)
    wanted = convolved(TorchMambaBackend, shape.whole(), drawn.wide(), torch.device("cpu"))
    bound = max(BOUND[dtype], 1e-4)
    assert worst(convolved(TritonStatesBackend, shape, drawn, torch.device("cuda")), wanted) < bound
