"""Questions to NVML, which answers without a context on the device. The library is imported when the first is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jackfield.errors import PluginError
from jackfield.interfaces import DeviceFacts, Probe

MIN_CAPABILITY = (8, 0)
DRIVER = Path("/dev/nvidiactl")
"""Exists where a driver is loaded."""
FEATURES = (("bf16", (8, 0)), ("async_copy", (8, 0)), ("fp8", (8, 9)), ("tma", (9, 0)), ("wgmma", (9, 0)))
"""Hardware features and the capability that brought each; ``wgmma`` exists in capability 9.x only."""
LANES = {(8, 0): 64}
"""Arithmetic lanes of a multiprocessor where they are not :data:`USUAL_LANES`."""
USUAL_LANES = 128


def probe_devices() -> Probe:
    """Say whether there are devices that can be used; what is wrong goes into the detail.

    Raises:
        PluginError: there is a driver, and no way to ask it.
    """
    try:
        with nvml() as library:
            devices = [_capability(library, i) for i in range(library.nvmlDeviceGetCount())]
    except ImportError:
        if not DRIVER.exists():
            return Probe(False, "no driver")
        # Saying "not present" here would put a machine with devices on the fallback platform without a word.
        raise PluginError(
            "a driver is loaded, but nvidia-ml-py is not installed",
            field="platform",
            value="cuda",
            remedy="pip install 'nvidia-ml-py>=12', or name another platform",
        ) from None
    except Exception as error:
        return Probe(False, f"no driver: {error}")
    return _judge(devices)


def _judge(capabilities: list[tuple[int, int]]) -> Probe:
    if not capabilities:
        return Probe(False, "a driver without devices")
    old = [f"device {i} has capability {_text(c)}" for i, c in enumerate(capabilities) if c < MIN_CAPABILITY]
    if old:
        return Probe(False, f"{', '.join(old)}; {_text(MIN_CAPABILITY)} is needed", len(capabilities))
    kinds = ", ".join(sorted({_text(c) for c in capabilities}))
    plural = "" if len(capabilities) == 1 else "s"
    return Probe(True, f"{len(capabilities)} device{plural} of capability {kinds}", len(capabilities))


def read_facts(index: int) -> DeviceFacts:
    """Return the facts of device ``index``, counted as NVML counts.

    Raises:
        PluginError: there is no such device, or NVML fails.
    """
    try:
        with nvml() as library:
            return _facts(library, index)
    except Exception as error:
        raise PluginError(
            f"device {index} cannot be asked through NVML: {error}",
            field="device",
            value=index,
            remedy="run nvidia-smi to see which devices the driver knows",
        ) from error


@contextmanager
def nvml() -> Iterator[Any]:
    """Open and close NVML."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _facts(library: Any, index: int) -> DeviceFacts:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    capability = _capability(library, index)
    name = library.nvmlDeviceGetName(handle)
    return DeviceFacts(
        type="cuda",
        name=name.decode() if isinstance(name, bytes) else name,
        index=index,
        capability=capability,
        memory_bytes=library.nvmlDeviceGetMemoryInfo(handle).total,
        cores=_multiprocessors(library, handle, capability),
        features=features(capability),
    )


def features(capability: tuple[int, int]) -> frozenset[str]:
    """Return the names of hardware features of a capability."""
    return frozenset(
        name for name, since in FEATURES if capability >= since and (name != "wgmma" or capability[0] == since[0])
    )


def _capability(library: Any, index: int) -> tuple[int, int]:
    major, minor = library.nvmlDeviceGetCudaComputeCapability(library.nvmlDeviceGetHandleByIndex(index))
    return int(major), int(minor)


def _multiprocessors(library: Any, handle: Any, capability: tuple[int, int]) -> int:
    """Return the number of multiprocessors, or 0 where NVML does not tell."""
    try:
        lanes = int(library.nvmlDeviceGetNumGpuCores(handle))
    except Exception:
        return 0
    return lanes // LANES.get(capability, USUAL_LANES)


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
