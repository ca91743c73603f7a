"""The encoder kind of ``torch_sdpa`` against a loop over tokens in float64.

Legend: T tokens, H query heads, K key heads, D head size, V value size, N tokens of a sequence.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jackfield.interfaces import AttentionEnv, AttentionRequest, AttentionStep, CacheSpec, StepLimits
from jackfield_attention.torch_sdpa import TorchSdpaBackend

LENGTHS = (5, 1, 17, 5, 1, 9, 17)


def request(*, kv_heads: int = 4, window: int | None = None, softcap: float = 0.0) -> AttentionRequest:
    return AttentionRequest(
        kind="encoder",
        needs=frozenset({"softcap"} if softcap else ()),
        dtype="float32",
        layers=(0,),
        num_heads=4,
        num_kv_heads=kv_heads,
        head_size=8,
        value_head_size=6,
        scale=0.3,
        window=window,
        softcap=softcap,
    )


def make_step(lengths: tuple[int, ...]) -> AttentionStep:
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    empty = torch.zeros(0)
    return AttentionStep(
        num_tokens=int(starts[-1]),
        num_sequences=len(lengths),
        num_decodes=lengths.count(1),
        max_query=max(lengths),
        max_length=max(lengths),
        query_start=torch.from_numpy(starts),
        lengths=empty,
        block_table=empty,
        slots=empty,
        positions=empty,
        query_start_host=starts,
        lengths_host=np.array(lengths, dtype=np.int32),
    )


def reference(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, lengths: tuple[int, ...], asked: AttentionRequest
) -> torch.Tensor:
    """Return [T, H, V]: one sequence, one token and one head at a time."""
    rows, start = [], 0
    for length in lengths:
        for token in range(length):
            first, last = 0, length
            if asked.window is not None:
                first, last = max(0, token - asked.window + 1), min(length, token + asked.window)
            for head in range(asked.num_heads):
                source = head // (asked.num_heads // asked.num_kv_heads)
                keys, values = (x[start + first : start + last, source].double() for x in (k_TKD, v_TKV))
                weights = (keys @ q_THD[start + token, head].double() * asked.scale).softmax(0)
                rows.append(weights @ values)
        start += length
    return torch.stack(rows).view(start, asked.num_heads, -1)


@pytest.mark.parametrize("window", [None, 1, 4, 16, 40])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_each_sequence_sees_itself_alone(kv_heads: int, window: int | None) -> None:
    asked, step = request(kv_heads=kv_heads, window=window), make_step(LENGTHS)
    assert list(TorchSdpaBackend.cache_specs(asked)) == [CacheSpec(())]
    torch.manual_seed(3)
    q, k = torch.randn(step.num_tokens, 4, 8), torch.randn(step.num_tokens, kv_heads, 8)
    v = torch.randn(step.num_tokens, kv_heads, 6)
    env = AttentionEnv(asked, CacheSpec(()), 16, torch.device("cpu"))
    builder = TorchSdpaBackend.metadata_builder(env)
    builder.allocate(StepLimits(step.num_tokens, step.num_sequences, 4, step.max_length))
    out = torch.full((step.num_tokens, 4, 6), float("nan"))
    TorchSdpaBackend.layer(env, 0).attend_fresh(q, k, v, builder.build(step), out)  # type: ignore[union-attr]
    torch.testing.assert_close(out.double(), reference(q, k, v, LENGTHS, asked), atol=2e-6, rtol=1e-5)


def test_what_no_encoder_has_is_rejected() -> None:
    assert not list(TorchSdpaBackend.check(request()))
    (reason,) = TorchSdpaBackend.check(request(softcap=30.0))
    assert reason.detail == "encoder layers have no softcap"
