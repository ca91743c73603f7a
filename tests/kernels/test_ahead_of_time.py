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
KERNELS = {
    *("rms_norm_kernel", "fused_add_rms_norm_kernel", "gated_kernel", "rotary_kernel"),
    *("write_kernel", "gather_kernel", "qk_norm_rope_write_kernel", "decode_kernel", "prefill_kernel"),
}


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


def test_matrix_units_are_used(rows: list[dict[str, Any]]) -> None:
    narrow = [row for row in rows if row["case"] != "float32"]
    assert all(row["wgmma"] for row in narrow if row["kernel"] == "prefill_kernel")
    assert all(row["mma"] for row in narrow if row["kernel"] == "decode_kernel")


def test_usual_shapes_spill_nothing(rows: list[dict[str, Any]]) -> None:
    usual = [row for row in rows if row["case"] not in ("float32", "head 256")]
    assert [row for row in usual if row["spilled_bytes"]] == []
