"""All kernels compile for capability 9.0, in bfloat16 and as they are launched; no device is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("ahead_of_time.py")
SHARED_LIMIT = 227 * 1024
"""Bytes that a program may have on capability 9.0."""
SMALL_LIMIT = 99 * 1024
"""The same on capability 8.9 and 12.0."""
KERNELS = {
    *("rms_norm_kernel", "fused_add_rms_norm_kernel", "gated_kernel", "rotary_kernel"),
    *("gated_quant_kernel", "quantize_kernel", "rescale_kernel"),
    *("write_kernel", "gather_kernel", "qk_norm_rope_write_kernel", "decode_kernel", "prefill_kernel"),
}

CHUNKS = {"conv_chunk_kernel", "ssd_decay_kernel", "ssd_states_kernel", "ssd_outputs_kernel"}
WALKS = {"ssd_scores_kernel", "ssd_walk_kernel"}
STATES = {"state_step_kernel", "selective_step_kernel", "conv_step_kernel"} | CHUNKS | WALKS
LATENTS = {
    "mla_write_kernel",
    "mla_decode_kernel",
    "mla_tiles_kernel",
    "mla_merge_kernel",
    "mla_prefill_kernel",
    "index_scores_kernel",
    "sparse_decode_kernel",
}
STEPS = {
    *("largest_parts_kernel", "largest_kernel", "token_inputs_kernel"),
    *("begin_round_kernel", "keep_tokens_kernel", "end_round_kernel"),
}
KERNELS |= STEPS | STATES | LATENTS | {"packed_kernel", "packed_few_kernel", "sliced_kernel"}
FOLLOWING = {"mla_write_kernel", "mla_decode_kernel", "mla_tiles_kernel", "mla_merge_kernel"}
"""Those over latents that a step of single tokens launches."""
ALONE = {"quantize_kernel", "rescale_kernel", "packed_few_kernel"} | STATES | (LATENTS - FOLLOWING)
"""Kernels that learn from their tensors' device whether they overlap, and those that never do."""
OVERLAPPED = KERNELS - {"write_kernel", "gather_kernel", "prefill_kernel"} - ALONE
"""Kernels of a decode step."""
ON_UNITS = {
    "decode_kernel",
    "mla_decode_kernel",
    "mla_tiles_kernel",
    "mla_prefill_kernel",
    "packed_kernel",
    "packed_few_kernel",
    "sliced_kernel",
    "index_scores_kernel",
    "sparse_decode_kernel",
    "ssd_states_kernel",
    "ssd_outputs_kernel",
}
WITH_WEIGHTS = {"rms_norm_kernel", "fused_add_rms_norm_kernel", "qk_norm_rope_write_kernel", "sliced_kernel"}
"""Those that read something before they wait."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAM), "90"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_was_compiled(rows: list[dict[str, Any]]) -> None:
    assert {row["kernel"] for row in rows} == KERNELS


def test_every_kernel_fits_the_device(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["shared_bytes"] > SHARED_LIMIT] == []


def test_latents_and_chunks_fit_devices_with_less_memory_too(rows: list[dict[str, Any]]) -> None:
    small = [row for row in rows if "small device" in row["case"]]
    found = {row["kernel"] for row in small} - {"conv_step_kernel", "state_step_kernel"}
    assert found == {name for name in LATENTS if name.startswith("mla_")} - {"mla_tiles_kernel"} | CHUNKS
    assert [row for row in small if row["shared_bytes"] > SMALL_LIMIT] == []


def test_matrix_units_are_used(rows: list[dict[str, Any]]) -> None:
    narrow = [row for row in rows if "float32" not in row["case"]]
    assert all(row["wgmma"] for row in narrow if row["kernel"] == "prefill_kernel")
    assert all(row["mma"] or row["wgmma"] for row in narrow if row["kernel"] in ON_UNITS)
    assert all(row["wgmma"] and not row["mma"] for row in narrow if row["kernel"] == "mla_tiles_kernel")
    large = [row for row in narrow if "bfloat16" in row["case"] and "small device" not in row["case"]]
    assert all(row["wgmma"] for row in large if row["kernel"] in ("ssd_states_kernel", "ssd_outputs_kernel"))


def test_usual_shapes_spill_nothing(rows: list[dict[str, Any]]) -> None:
    usual = [row for row in rows if "float32" not in row["case"] and row["case"] != "head 256"]
    assert [row for row in usual if row["spilled_bytes"]] == []


def test_kernels_of_a_decode_step_are_compiled_to_overlap_and_to_follow(rows: list[dict[str, Any]]) -> None:
    assert {row["kernel"] for row in rows if row["pdl"]} == OVERLAPPED
    assert {row["kernel"] for row in rows if not row["pdl"]} == KERNELS
    assert all("apart" in row["case"] for row in rows if row["kernel"] in OVERLAPPED and not row["pdl"])


def test_overlapped_kernels_wait_before_they_write(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        expected = (1, 1) if row["pdl"] else (0, 0)
        assert (row["waits"], row["releases"]) == expected, row
        assert row["stores"] > 0, row
        assert not row["pdl"] or row["stores_before"] == 0, row


def test_overlapped_kernels_read_weights_alone_before_they_wait(rows: list[dict[str, Any]]) -> None:
    overlapped = [row for row in rows if row["pdl"]]
    assert {row["kernel"] for row in overlapped if row["loads_before"]} == WITH_WEIGHTS
    assert all(row["loads_after"] for row in overlapped)
