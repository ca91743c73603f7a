from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jackfield.interfaces import Band, DeviceFacts, PlatformRequest
from jackfield_platforms import cpu
from jackfield_platforms.cpu import CpuPlatform
from jackfield_platforms.cpu_graphs import CpuGraphs


class NoConfig:
    """A configuration in which nobody set anything."""

    def get(self, field: str) -> object:
        raise KeyError(field)

    def is_user_set(self, field: str) -> bool:
        return False

    def plugin_options(self, name: str) -> dict[str, object]:
        return {}


def test_it_is_always_there_and_never_first() -> None:
    probe = CpuPlatform.probe()
    assert probe.present and probe.device_count == 1
    assert CpuPlatform.is_fallback
    assert CpuPlatform.preference(PlatformRequest()).band == Band.FALLBACK


def test_facts_are_those_of_the_host() -> None:
    facts = CpuPlatform.facts(0)
    assert facts.type == "cpu"
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.memory_bytes == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.05)


def test_bound_it_reports_memory_and_its_device() -> None:
    platform = CpuPlatform.bind(0, NoConfig())
    assert platform.device == torch.device("cpu")
    memory = platform.memory()
    assert 0 < memory.free <= memory.total == CpuPlatform.facts(0).memory_bytes
    assert platform.stream_api() is None and platform.communicator(None) is None
    assert isinstance(platform.graph_api(), CpuGraphs)


@pytest.mark.parametrize(
    ("total", "budget"), [(64 << 30, 4 << 30), (8 << 30, 2 << 30), (100 << 20, 64 << 20), (0, 64 << 20)]
)
def test_the_cache_leaves_memory_to_the_host(total: int, budget: int) -> None:
    found = {p.field: p for p in CpuPlatform.proposals(NoConfig(), DeviceFacts("cpu", memory_bytes=total))}
    assert found["cache.kv_cache_memory"].value == budget
    assert not any(proposal.must for proposal in found.values())
    assert all(proposal.reason for proposal in found.values())


def test_a_host_without_proc_still_has_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(cpu, "_MEMINFO", tmp_path / "none")
    facts = CpuPlatform.facts(0)
    assert (facts.name, facts.features) == ("", frozenset())
    assert facts.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_light_module_does_not_import_torch() -> None:
    code = "import sys, jackfield_platforms.cpu as c; c.CpuPlatform.facts(0); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
