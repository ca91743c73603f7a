"""A broken plugin in the environment, as a user meets it: everything else goes on, and nothing is hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import CPU_ATTENTION, CPU_OPS

from jackfield.interfaces.families import FAMILIES

POINTS = (
    "[jackfield.attention_backends.v1]\nboom = broken_mod:Boom\n[jackfield.drafters.v2]\nfuture = broken_mod:Future\n"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed distribution whose module raises."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "broken_mod.py").write_text('raise RuntimeError("this plugin is broken")\n')
    info = folder / "broken_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    return folder


def jackfield(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    command = [sys.executable, "-m", "jackfield.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


def test_help_and_plugins_work_and_tell_what_is_wrong(site: Path) -> None:
    assert jackfield(site, "--help").returncode == 0
    listed = jackfield(site, "plugins")
    assert listed.returncode == 0
    assert "plugin boom (broken-plugin 1.0) could not be loaded: RuntimeError: this plugin is broken" in listed.stdout
    offered = ".".join(map(str, FAMILIES["drafters"].version))
    wanted = f"plugin future (broken-plugin 1.0) could not be loaded: needs drafters API 2, this core offers {offered}"
    assert wanted in listed.stdout


def test_generate_works_with_another_backend(site: Path, text_model: Any) -> None:
    done = jackfield(site, "generate", str(text_model.folder), "abc", "--max-tokens", "4", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith(f" · {CPU_ATTENTION} · ops {CPU_OPS}")


def test_explain_shows_it_and_forcing_it_is_an_error(site: Path, text_model: Any) -> None:
    # In a table the reason may be wrapped.
    shown = jackfield(site, "explain", str(text_model.folder), "--json")
    assert "load_failed" in shown.stdout and "RuntimeError: this plugin is broken" in shown.stdout
    forced = jackfield(site, "generate", str(text_model.folder), "abc", "--attention.force", "boom")
    assert forced.returncode == 2
    assert "'boom' was forced" in forced.stderr and "field: attention.force = 'boom'" in forced.stderr
    assert "remedy: plugins that can serve it: " in forced.stderr and "torch_sdpa" in forced.stderr
