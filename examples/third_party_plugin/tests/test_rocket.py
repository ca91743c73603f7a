"""The backends against attention written out: two steps over shuffled pages, grouped heads, mixed lengths."""

import numpy as np
import pytest
import torch
from acme_rocket.backend import Rocket, RocketRows

from jackfield.interfaces import AttentionEnv, AttentionRequest, AttentionStep

HEADS, KV_HEADS, SIZE, BLOCK, PAGES = 4, 2, 8, 4, 12
REQUEST = AttentionRequest(
    kind="full", dtype="float32", num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, scale=0.3
)
TABLE = torch.tensor([[7, 2, 9, 0], [11, 4, 1, 3]], dtype=torch.int32)


def step_of(before: list[int], new: list[int]) -> AttentionStep:
    starts = np.cumsum([0, *new])
    lengths = [old + count for old, count in zip(before, new, strict=True)]
    positions = torch.cat([torch.arange(old, length) for old, length in zip(before, lengths, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
    return AttentionStep(
        num_tokens=sum(new),
        num_sequences=len(new),
        num_decodes=sum(count == 1 for count in new),
        max_query=max(new),
        max_length=max(lengths),
        query_start=torch.from_numpy(starts),
        lengths=torch.tensor(lengths),
        block_table=TABLE,
        slots=TABLE[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        positions=positions,
        query_start_host=starts,
        lengths_host=np.array(lengths),
    )


def written_out(q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
    """Return causal attention of one whole sequence, head by head and token by token."""
    out = torch.zeros_like(q_THD)
    for head in range(HEADS):
        kept = head * KV_HEADS // HEADS
        for token in range(len(q_THD)):
            scores = k_TKD[: token + 1, kept] @ q_THD[token, head] * REQUEST.scale
            out[token, head] = scores.softmax(0) @ v_TKD[: token + 1, kept]
    return out


@pytest.mark.parametrize("backend", [Rocket, RocketRows])
def test_two_steps_equal_attention_written_out(backend: type[Rocket]) -> None:
    torch.manual_seed(0)
    (spec,) = backend.cache_specs(REQUEST)
    env = AttentionEnv(REQUEST, spec, BLOCK, torch.device("cpu"))
    cache = {plane.name: torch.full((PAGES, *plane.page_shape(BLOCK)), float("nan")) for plane in spec.planes}
    builder, layer = backend.metadata_builder(env), backend.layer(env, 0)
    lengths, first = [10, 13], [9, 6]
    whole = [tuple(torch.randn(n, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)) for n in lengths]
    outs: list[list[torch.Tensor]] = [[], []]
    for before, new in (([0, 0], first), (first, [1, 7])):
        cut = [tuple(part[old : old + n] for part in qkv) for qkv, old, n in zip(whole, before, new, strict=True)]
        q, k, v = (torch.cat(parts) for parts in zip(*cut, strict=True))
        step = step_of(before, new)
        out = torch.empty_like(q)
        layer.write(k, v, cache, step.slots)
        layer.attend(q, cache, builder.build(step), out)
        for mine, part in zip(outs, torch.split(out, new), strict=True):
            mine.append(part)
    for mine, qkv in zip(outs, whole, strict=True):
        torch.testing.assert_close(torch.cat(mine), written_out(*qkv))


def test_negative_slots_are_not_written() -> None:
    (spec,) = Rocket.cache_specs(REQUEST)
    cache = {plane.name: torch.zeros((PAGES, *plane.page_shape(BLOCK))) for plane in spec.planes}
    ones = torch.ones(2, KV_HEADS, SIZE)
    Rocket.layer(AttentionEnv(REQUEST, spec, BLOCK, torch.device("cpu")), 0).write(
        ones, ones, cache, torch.tensor([-1, 5])
    )
    assert set(cache["k"].nonzero()[:, 0].tolist()) == {1}
    assert int(cache["k"].sum()) == KV_HEADS * SIZE
