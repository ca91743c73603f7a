"""Keys and values in fewer bits: what attention sees is what a quantizer written here says was stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jackfield.interfaces import AttentionEnv, AttentionRequest, AttentionStep, DeviceFacts
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_attention.torch_mla import TorchMlaBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend

KEYS, HEADS, SIZE, BLOCK = 2, 4, 8, 4
KINDS = ("float8_e4m3fn", "float8_e5m2", "int8", "int4")


def request(stored: str, **changes: object) -> AttentionRequest:
    values = {"kind": "full", "num_heads": HEADS, "num_kv_heads": KEYS, "head_size": SIZE, "value_head_size": SIZE}
    return AttentionRequest(dtype="float32", cache_dtype=stored, scale=SIZE**-0.5, **{**values, **changes})  # type: ignore[arg-type]


def what_is_left(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return what is left of vectors after they were stored."""
    if kind.startswith("float8"):
        largest = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[kind]
        return x.clamp(-largest, largest).to(getattr(torch, kind)).float()
    steps = {"int8": 127, "int4": 7}[kind]
    scale = x.abs().amax(-1, keepdim=True) / steps
    return torch.where(scale > 0, (x / scale).round() * scale, x)


def make_step(lengths: list[int], new: list[int]) -> AttentionStep:
    starts = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
    blocks = [-(-length // BLOCK) for length in lengths]
    table = np.zeros((len(lengths), max(blocks)), dtype=np.int32)
    for row, count in enumerate(blocks):
        table[row, :count] = 1 + sum(blocks[:row]) + np.arange(count)[::-1]
    rows = np.repeat(np.arange(len(new)), new)
    positions = np.concatenate([np.arange(length - n, length) for length, n in zip(lengths, new, strict=True)])
    slots = table[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    return AttentionStep(
        num_tokens=len(rows),
        num_sequences=len(new),
        num_decodes=new.count(1),
        max_query=max(new),
        max_length=max(lengths),
        query_start=torch.from_numpy(starts),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.from_numpy(table),
        slots=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
        query_start_host=starts,
        lengths_host=np.array(lengths, dtype=np.int32),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_attention_sees_what_was_stored(kind: str) -> None:
    asked = request(kind)
    assert not TorchSdpaBackend.check(asked)
    spec = TorchSdpaBackend.cache_specs(asked)[0]
    env = AttentionEnv(asked, spec, BLOCK, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    lengths = [9, 20]
    cache = {p.name: torch.zeros((10, *p.page_shape(BLOCK)), dtype=getattr(torch, p.dtype)) for p in spec.planes}
    k, v = (torch.randn(sum(lengths), KEYS, SIZE, generator=generator) * 3 for _ in range(2))
    q = torch.randn(sum(lengths), HEADS, SIZE, generator=generator)
    layer, builder = TorchSdpaBackend.layer(env, 0), TorchSdpaBackend.metadata_builder(env)
    whole = make_step(lengths, lengths)
    layer.write(k, v, cache, whole.slots)
    out = torch.empty_like(q)
    layer.attend(q, cache, builder.build(whole), out)
    short = make_step(lengths, [1, 3])
    rows = torch.tensor([8, 26, 27, 28])
    last = torch.empty(4, HEADS, SIZE)
    layer.attend(q[rows], cache, builder.build(short), last)
    torch.testing.assert_close(last, out[rows])
    for start, stop in ((0, 9), (9, 29)):
        ks, vs = (what_is_left(x[start:stop], kind).repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        scores = q[start:stop].transpose(0, 1) @ ks.transpose(1, 2) * SIZE**-0.5
        later = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        wanted = (scores.masked_fill(later, float("-inf")).softmax(-1) @ vs).transpose(0, 1)
        torch.testing.assert_close(out[start:stop], wanted, rtol=1e-4, atol=1e-4)
    assert (what_is_left(k, kind) - k).abs().max() > 1e-3, "the type is narrow enough to be told from float32"


@pytest.mark.parametrize(("kind", "bits"), [("float8_e4m3fn", 8), ("int8", 8 + 32 / SIZE), ("int4", 4 + 32 / SIZE)])
def test_pages_are_as_small_as_their_type(kind: str, bits: float) -> None:
    spec = TorchSdpaBackend.cache_specs(request(kind))[0]
    assert spec.page_bytes(BLOCK) == 2 * KEYS * BLOCK * SIZE * bits / 8


def test_types_that_cannot_be_read_are_refused_with_what_can() -> None:
    reasons = TorchSdpaBackend.check(request("float4"))
    assert [(r.code, r.fact) for r in reasons] == [("cache_dtype", "cache_dtype")]
    assert reasons[0].remedy == "use one of: float32, float8_e4m3fn, float8_e5m2, int8, int4"
    odd = TorchSdpaBackend.check(request("int4", head_size=7, value_head_size=8))
    assert odd[0].detail == "int4 packs 2 numbers in a byte, and 7 cannot be packed so"
    facts = DeviceFacts(type="cpu")
    native = NativeCpuBackend.check(request("int8", device=facts))
    assert native[0].detail == "int8 differs from the computation type float32"
    latent = request("int8", kind="mla", extra={"latent_size": 8, "rope_size": 4})
    assert TorchMlaBackend.check(latent)[0].detail == "int8 is no type that latents can be stored in"
