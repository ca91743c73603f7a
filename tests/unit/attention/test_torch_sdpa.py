from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from jackfield.interfaces import (
    BLOCK,
    AttentionEnv,
    AttentionRequest,
    AttentionStep,
    Band,
    DeviceFacts,
    Plane,
    RankInfo,
)
from jackfield.layers.composite import cut_step
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_attention.torch_sdpa_layer import SdpaMetadata

CPU = torch.device("cpu")
REQUEST = AttentionRequest(
    kind="full", dtype="float32", num_heads=4, num_kv_heads=2, head_size=8, value_head_size=6, scale=1.0
)


def step_of(counts: list[int], lengths: list[int], block: int = 4) -> AttentionStep:
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    blocks = [-(-length // block) for length in lengths]
    table = np.zeros((len(counts), max(blocks)), dtype=np.int32)
    page = 1
    for row, count in enumerate(blocks):
        table[row, :count] = np.arange(page, page + count)
        page += count
    positions = np.concatenate([np.arange(n - c, n) for c, n in zip(counts, lengths, strict=True)])
    rows = np.repeat(np.arange(len(counts)), counts)
    slots = table[rows, positions // block].astype(np.int64) * block + positions % block
    return AttentionStep(
        num_tokens=int(starts[-1]),
        num_sequences=len(counts),
        num_decodes=counts.count(1),
        max_query=max(counts),
        max_length=max(lengths),
        query_start=torch.from_numpy(starts),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.from_numpy(table),
        slots=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
        query_start_host=starts,
        lengths_host=np.array(lengths, dtype=np.int32),
    )


def metadata(step: AttentionStep, window: int | None = None, block: int = 4) -> SdpaMetadata:
    request = replace(REQUEST, window=window)
    env = AttentionEnv(request, TorchSdpaBackend.cache_specs(request)[0], block, CPU)
    built = TorchSdpaBackend.metadata_builder(env).build(step)
    assert isinstance(built, SdpaMetadata)
    return built


def test_the_layout_is_heads_outside_tokens() -> None:
    (spec,) = TorchSdpaBackend.cache_specs(REQUEST)
    assert spec.planes == (
        Plane("k", "float32", (2, BLOCK, 8), shard_dim=0),
        Plane("v", "float32", (2, BLOCK, 6), shard_dim=0),
    )
    assert spec.window is None


def test_each_rank_keeps_its_cache_heads() -> None:
    (spec,) = TorchSdpaBackend.cache_specs(replace(REQUEST, rank=RankInfo(0, 4), window=9, cache_dtype="bfloat16"))
    assert [plane.shape[0] for plane in spec.planes] == [1, 1]
    assert {plane.dtype for plane in spec.planes} == {"bfloat16"}
    assert spec.window == 9


def test_it_is_the_choice_on_cpus_and_the_last_resort_elsewhere() -> None:
    assert TorchSdpaBackend.preference(replace(REQUEST, device=DeviceFacts("cpu"))).band is Band.SUPPORTED
    assert TorchSdpaBackend.preference(replace(REQUEST, device=DeviceFacts("other"))).band is Band.FALLBACK
    assert TorchSdpaBackend.preference(REQUEST).band is Band.FALLBACK


@pytest.mark.parametrize("lengths", [[64] * 8, [505, 1, 1, 1, 1, 1, 1, 1], [1, 511]])
def test_decode_reads_only_the_blocks_that_are_seen(lengths: list[int]) -> None:
    rows = metadata(step_of([1] * len(lengths), lengths)).rows
    assert rows is not None
    assert len(rows.pages) == sum(-(-length // 4) for length in lengths)


def test_windows_are_read_and_nothing_before() -> None:
    rows = metadata(step_of([1, 1], [100, 3]), window=6).rows
    assert rows is not None
    # Positions 94 to 99 lie in blocks 23 and 24; the three tokens of the other in one block.
    assert len(rows.pages) == 3
    (query,) = metadata(step_of([20], [100]), window=6).long
    # The first of the 20 tokens sees positions 75 to 80: block 18 on.
    assert len(query.pages) == 25 - 18 and query.length == 100 - 72


def test_long_queries_are_told_from_short_ones() -> None:
    built = metadata(step_of([1, 8, 9, 30], [5, 8, 9, 40]))
    assert built.rows is not None and built.rows.count == 9
    assert [(query.start, query.stop) for query in built.long] == [(9, 18), (18, 48)]
    assert [query.mask_NL is None for query in built.long] == [True, False]


def test_no_loop_and_no_growth_with_sequences_in_decode() -> None:
    """The number of tensor operations of a decode step does not depend on how many sequences it has."""
    counts = []
    for sequences in (2, 60):
        step = step_of([1] * sequences, [9] * sequences)
        env = AttentionEnv(REQUEST, TorchSdpaBackend.cache_specs(REQUEST)[0], 4, CPU)
        built = TorchSdpaBackend.metadata_builder(env).build(step)
        cache = {name: torch.zeros(200, 2, 4, size) for name, size in (("k", 8), ("v", 6))}
        out = torch.empty(sequences, 4, 6)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            TorchSdpaBackend.layer(env, 0).attend(torch.zeros(sequences, 4, 8), cache, built, out)
        counts.append(sum(event.count for event in profile.key_averages()))
    assert counts[0] == counts[1]


def test_attend_raises_no_warnings() -> None:
    step = step_of([1, 10], [9, 12])
    env = AttentionEnv(REQUEST, TorchSdpaBackend.cache_specs(REQUEST)[0], 4, CPU)
    built = TorchSdpaBackend.metadata_builder(env).build(step)
    cache = {name: torch.zeros(20, 2, 4, size) for name, size in (("k", 8), ("v", 6))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchSdpaBackend.layer(env, 0).attend(torch.zeros(11, 4, 8), cache, built, torch.empty(11, 4, 6))


@pytest.mark.parametrize("name", ["capture", "advance"])
def test_graphs_and_draft_steps_are_refused_aloud(name: str) -> None:
    env = AttentionEnv(REQUEST, TorchSdpaBackend.cache_specs(REQUEST)[0], 4, CPU)
    builder = TorchSdpaBackend.metadata_builder(env)
    with pytest.raises(NotImplementedError, match="torch_sdpa"):
        builder.capture(1, 1) if name == "capture" else builder.advance(1)


def test_a_step_is_cut_at_a_sequence() -> None:
    step = step_of([1, 1, 3, 5], [4, 9, 3, 7])
    tail = cut_step(step, 2, 4)
    assert (tail.num_tokens, tail.num_sequences, tail.num_decodes, tail.max_query) == (8, 2, 0, 5)
    assert tail.query_start.tolist() == tail.query_start_host.tolist() == [0, 3, 8]
    assert tail.lengths.tolist() == [3, 7]
    assert torch.equal(tail.slots, step.slots[2:]) and torch.equal(tail.positions, step.positions[2:])
    assert torch.equal(tail.block_table, step.block_table[2:])
    head = cut_step(step, 0, 2)
    assert (head.num_tokens, head.num_decodes, head.max_query) == (2, 2, 1)
    assert head.lengths_host is not None and head.lengths_host.tolist() == [4, 9]


def test_the_light_module_does_not_import_torch() -> None:
    code = "import sys, jackfield_attention.torch_sdpa; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
