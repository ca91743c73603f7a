"""What the CUDA platform makes of NVML's answers; NVML itself is a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jackfield.errors import PluginError
from jackfield.interfaces import Band, DeviceFacts, PlatformRequest, Probe
from jackfield_platforms.cuda import CudaPlatform
from jackfield_platforms.cuda_nvml import features


class Nvml:
    """Devices given as (name, capability, lanes, bytes); lanes None: the library does not tell."""

    def __init__(self, *devices: tuple[str, tuple[int, int], int | None, int], fails: str = "") -> None:
        self.devices, self.fails, self.open = devices, fails, 0

    def nvmlInit(self) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if index >= len(self.devices):
            raise RuntimeError("Invalid Argument")
        return self.devices[index]

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(handle[0])

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        return (handle[1][0], handle[1][1])

    def nvmlDeviceGetNumGpuCores(self, handle: Any) -> int:
        if handle[2] is None:
            raise RuntimeError("Not Supported")
        return int(handle[2])

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> SimpleNamespace:
        return SimpleNamespace(total=handle[3])


H = ("NVIDIA H200", (9, 0), 16896, 150 << 30)
A = ("NVIDIA A100", (8, 0), 6912, 80 << 30)
OLD = ("Tesla T4", (7, 5), 2560, 16 << 30)


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found: Nvml = request.param
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


@pytest.mark.parametrize(
    ("library", "probe"),
    [
        (Nvml(H), Probe(True, "1 device of capability 9.0", 1)),
        (Nvml(H, A), Probe(True, "2 devices of capability 8.0, 9.0", 2)),
        (Nvml(), Probe(False, "a driver without devices")),
        (Nvml(fails="Driver Not Loaded"), Probe(False, "no driver: Driver Not Loaded")),
        (Nvml(H, OLD), Probe(False, "device 1 has capability 7.5; 8.0 is needed", 2)),
    ],
    indirect=["library"],
)
def test_probe(library: Nvml, probe: Probe) -> None:
    assert CudaPlatform.probe() == probe
    assert library.open == 0


def test_probe_without_package_and_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("jackfield_platforms.cuda_nvml.DRIVER", tmp_path / "absent")
    assert CudaPlatform.probe() == Probe(False, "no driver")


def test_a_driver_that_cannot_be_asked_is_a_failure_and_not_an_absence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("jackfield_platforms.cuda_nvml.DRIVER", tmp_path)
    with pytest.raises(PluginError, match="nvidia-ml-py is not installed"):
        CudaPlatform.probe()


@pytest.mark.parametrize("library", [Nvml(H, A, ("unknown", (8, 9), None, 1))], indirect=True)
def test_facts(library: Nvml) -> None:
    assert CudaPlatform.facts(0) == DeviceFacts(
        "cuda", "NVIDIA H200", 0, (9, 0), 150 << 30, 132, frozenset({"bf16", "async_copy", "fp8", "tma", "wgmma"})
    )
    assert CudaPlatform.facts(1) == DeviceFacts(
        "cuda", "NVIDIA A100", 1, (8, 0), 80 << 30, 108, frozenset({"bf16", "async_copy"})
    )
    assert CudaPlatform.facts(2).cores == 0
    assert library.open == 0


@pytest.mark.parametrize("library", [Nvml(H)], indirect=True)
def test_facts_of_a_device_that_is_not_there(library: Nvml) -> None:
    with pytest.raises(PluginError) as caught:
        CudaPlatform.facts(3)
    assert str(caught.value) == (
        "device 3 cannot be asked through NVML: Invalid Argument\n"
        "  field: device = 3\n"
        "  remedy: run nvidia-smi to see which devices the driver knows"
    )
    assert library.open == 0


def test_features_follow_the_capability() -> None:
    assert features((7, 5)) == frozenset()
    assert features((8, 9)) == {"bf16", "async_copy", "fp8"}
    assert features((10, 0)) == {"bf16", "async_copy", "fp8", "tma"}


def test_proposals_only_fill_defaults() -> None:
    assert CudaPlatform.preference(PlatformRequest(kind="devices")).band is Band.GOOD
    found = CudaPlatform.proposals(None, DeviceFacts("cuda"))  # type: ignore[arg-type]  # nothing is asked of it
    assert {p.field: p.value for p in found} == {
        "cache.block_size": 64,
        "scheduler.max_num_seqs": 256,
        "scheduler.max_num_batched_tokens": 8192,
    }
    assert not any(p.must for p in found)
