"""Writing, gathering, and the fused way from a projection into the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_case import TOLERANCE, Case, Shape, error, limits_of, make_case

from jackfield.layers.functional import rms_norm, rotary
from jackfield_attention.flash_attn import FlashAttnBackend
from jackfield_attention.flash_attn_layer import FlashLayer, FlashMetadataBuilder
from jackfield_attention.triton_backend import TritonBackend

LAYOUTS = pytest.mark.parametrize("layout", [0, 1], ids=["heads outside", "tokens outside"])


def rows_at(case: Case, slots: torch.Tensor, name: str) -> torch.Tensor:
    """Return what lies at slots, [T, K, D]."""
    plane = case.cache[name] if case.shape.layout else case.cache[name].transpose(1, 2)
    return plane.flatten(0, 1)[slots]


def blank(case: Case) -> list[int]:
    """Poison the cache and forbid the second token's slot; return the tokens that are to be written."""
    for plane in case.cache.values():
        plane.fill_(float("nan"))
    case.step.slots[1] = -1
    return [t for t in range(len(case.step.slots)) if t != 1]


def written_count(case: Case) -> int:
    """Return how many numbers of the key plane are no longer poisoned."""
    return int((~case.cache["k"].isnan()).sum())


@LAYOUTS
@pytest.mark.parametrize("heads", [1, 3, 9])
def test_write(layout: int, heads: int) -> None:
    case = make_case(TritonBackend, Shape([1, 2, 3], [1, 20, 33], heads=heads, kv_heads=heads, size=24, layout=layout))
    kept = blank(case)
    size = heads * 24
    k, v = (case.qkv[:, i * size : (i + 1) * size].view(-1, heads, 24) for i in (1, 2))
    TritonBackend.layer(case.env, 0).write(k, v, case.cache, case.step.slots)
    slots = case.step.slots[kept]
    assert torch.equal(rows_at(case, slots, "k"), k[kept])
    assert torch.equal(rows_at(case, slots, "v"), v[kept])
    assert written_count(case) == len(kept) * size


CASES: dict[str, dict[str, Any]] = {
    "norm and rotation": {},
    "rotation alone": {"norm": False},
    "norm alone": {"rotary": 0},
    "neither": {"norm": False, "rotary": 0},
    "half of the head is rotated": {"rotary": 16},
    "an odd part is rotated": {"rotary": 12},
    "many heads": {"heads": 18, "kv_heads": 9},
    "head size 80": {"size": 80, "rotary": 80},
    "half precision": {"dtype": "float16"},
}


@LAYOUTS
@pytest.mark.parametrize("name", CASES)
def test_prepare_is_norm_rotation_and_write(name: str, layout: int) -> None:
    options = {"norm": True, "rotary": 32, "heads": 4, "kv_heads": 2, "size": 32, "dtype": "float32", **CASES[name]}
    norm, turned = options.pop("norm"), options.pop("rotary")
    case = make_case(TritonBackend, Shape([1, 2, 3], [1, 20, 33], layout=layout, **options))
    kept = blank(case)
    shape, dtype = case.shape, case.qkv.dtype
    weights = [torch.rand(shape.size).to(dtype) + 0.5 for _ in range(2)]
    angles = torch.rand(len(case.qkv), max(turned, 2)) * 6
    cos_sin = torch.cat((angles[:, : turned // 2].cos(), angles[:, : turned // 2].sin()), 1) if turned else None
    heads = case.qkv.clone().view(len(case.qkv), -1, shape.size)
    q, k, v = (part.contiguous() for part in torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], 1))
    if norm:
        q, k = rms_norm(q, weights[0], 1e-5), rms_norm(k, weights[1], 1e-5)
    if cos_sin is not None:
        rotary(q, cos_sin)
        rotary(k, cos_sin)
    q_weight, k_weight = weights if norm else (None, None)
    before = case.qkv.clone()
    TritonBackend.layer(case.env, 0).prepare(case.qkv, cos_sin, q_weight, k_weight, 1e-5, case.cache, case.step.slots)
    slots, bound = case.step.slots[kept], TOLERANCE[shape.dtype] / 2
    assert error(case.q, q) < bound
    assert error(rows_at(case, slots, "k"), k[kept]) < bound
    assert torch.equal(rows_at(case, slots, "v"), v[kept])
    assert written_count(case) == len(kept) * shape.kv_heads * shape.size
    rest = shape.heads * shape.size
    assert torch.equal(case.qkv[:, rest:], before[:, rest:])


@LAYOUTS
@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (18, 9)])
def test_what_is_stored_is_divided_by_the_scale(layout: int, stored: str, heads: int, kv_heads: int) -> None:
    """To the bit as torch divides and rounds, by both ways into the cache. The interpreter loses a carry where a number
    is rounded up to the next power of two, so that quotients are numbers of the narrow type here.
    """
    sizes = {"heads": heads, "kv_heads": kv_heads, "dtype": "float16", "layout": layout}
    case = make_case(TritonBackend, Shape([1, 2, 3], [1, 20, 33], stored=stored, scaled=True, **sizes))
    kind, largest = getattr(torch, stored), torch.finfo(getattr(torch, stored)).max
    case.qkv.copy_(case.qkv.to(kind))
    case.qkv[0] *= 1024.0  # some numbers must be cut off
    for bound in (case.env.k_scale, case.env.v_scale):
        assert bound is not None
        bound.copy_(0.5 ** torch.randint(1, 4, bound.shape))
    split = torch.split(case.qkv.view(len(case.qkv), -1, 32).clone(), [heads, kv_heads, kv_heads], 1)
    layer, slots = TritonBackend.layer(case.env, 0), case.step.slots
    scales = {"k": case.env.k_scale, "v": case.env.v_scale}
    wanted = {}
    for name, part in zip("kv", split[1:], strict=True):
        scale = scales[name]
        assert scale is not None
        wanted[name] = (part.float() / scale[:, None]).clamp(-largest, largest).to(kind).view(torch.uint8)
    cut_off = torch.tensor(largest).to(kind).view(torch.uint8)
    assert kind is torch.float8_e5m2 or bool((wanted["k"] == cut_off).any())
    assert len(wanted["k"].unique()) > 40
    for way in ("write", "prepare"):
        for plane in case.cache.values():
            plane.view(torch.uint8).fill_(0x7F)
        if way == "write":
            layer.write(split[1], split[2], case.cache, slots)
        else:
            layer.prepare(case.qkv, None, None, None, 0.0, case.cache, slots)
        for name, bits in wanted.items():
            plane = case.cache[name] if layout else case.cache[name].transpose(1, 2)
            assert torch.equal(plane.reshape(-1, *plane.shape[2:])[slots].view(torch.uint8), bits), (way, name)
    assert torch.equal(case.q, split[0]), "queries are not divided"


@LAYOUTS
@pytest.mark.parametrize("block", [5, 16, 64])
def test_gather_lays_sequences_one_after_another(layout: int, block: int) -> None:
    shape = Shape([1, 20, 40], [70, 33, 90], layout=layout, block=block, size=24, dtype="float16")
    case = make_case(FlashAttnBackend, shape)
    builder = FlashMetadataBuilder(case.env)
    builder.allocate(limits_of(case))
    metadata = builder.build(case.step)
    long = metadata.long
    assert long is not None
    assert (metadata.short.num_short, long.first, long.start) == (1, 1, 1)
    assert long.query_start.tolist() == [0, 20, 60]
    assert long.key_start.tolist() == [0, 33, 123]
    assert long.kept >= 123
    k, v = FlashLayer(case.env).gather(case.cache, metadata.short, long)
    assert torch.equal(k[:123], torch.cat(case.k[1:]))
    assert torch.equal(v[:123], torch.cat(case.v[1:]))


def test_a_step_of_decodes_has_no_long_queries() -> None:
    case = make_case(FlashAttnBackend, Shape([1, 1], [70, 33], dtype="float16"))
    builder = FlashMetadataBuilder(case.env)
    builder.allocate(limits_of(case))
    assert builder.build(case.step).long is None
    assert builder.capture(2, 1).long is None
