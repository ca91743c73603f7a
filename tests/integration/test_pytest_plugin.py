"""The engine's own suite, through a plugin of one's choice, from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ASKED = "test_what_was_asked_for_is_what_runs"


def suite(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the suite in an empty folder; return the exit code and what it says."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "jackfield.testing.suite"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_backend_is_chosen(tmp_path: Path) -> None:
    code, told = suite(tmp_path, "--attention-backend", "torch_sdpa", "-k", ASKED)
    assert code == 0 and "1 passed" in told


@pytest.mark.slow
def test_a_backend_that_runs_nothing_fails(tmp_path: Path) -> None:
    code, told = suite(tmp_path, "--attention-backend", "torch_mamba", "-k", ASKED)
    assert code == 1 and "the plugin runs nothing of the suite" in told and "kind: 'full' is not among" in told


def test_a_setting_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    code, told = suite(tmp_path, "--engine-setting", "scheduler.policy")
    assert code == pytest.ExitCode.USAGE_ERROR and "write FIELD=VALUE" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--attention-backend", "torch_sdpa"],
        ["--engine-setting", "scheduler.policy=priority"],
        ["--engine-setting", "scheduler.async_scheduling=false", "--engine-setting", "ops.force=torch"],
    ],
    ids=["attention", "policy", "settings"],
)
def test_the_whole_suite(tmp_path: Path, arguments: list[str]) -> None:
    code, told = suite(tmp_path, *arguments)
    assert code == 0 and " passed" in told and "skipped" not in told, told
