"""How kernels are launched.

Programmatic dependent launch: a kernel starts while the one before it in the stream drains.

Such a kernel waits before it touches anything that an earlier kernel may write or still read; before that it may read
what no kernel of a step writes, which are weights. A wait ends when the kernel before has ended, which itself waited
in every program, so all earlier ones have ended too. See the CUDA C++ programming guide, "Programmatic Dependent
Launch and Synchronization".
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from jackfield.interfaces import DeviceFacts, Reason

OLDEST = (8, 0)
"""The oldest devices with bfloat16 arithmetic and asynchronous copies."""
MIN_CAPABILITY = (9, 0)
INSTRUCTIONS = "triton.language.extra.cuda.gdc"
"""The module of Triton (3.4 on) with the instructions that kernels need for it."""

GLUON_VERSION = (3, 6)


def capability_reasons(device: DeviceFacts | None) -> list[Reason]:
    """Return why kernels do not run on a device: it is older than :data:`OLDEST`."""
    if device is None or device.type != "cuda" or device.capability >= OLDEST:
        return []
    found, least = (".".join(map(str, capability)) for capability in (device.capability, OLDEST))
    return [Reason("capability", "device.capability", f"{found} is below {least}")]


def pdl_of(capability: tuple[int, int], wanted: bool = True) -> bool:
    """Return whether kernels are launched so.

    Args:
        capability: of the device that they run on; (0, 0) where they run on none. wanted: what the user set.
    """
    return wanted and capability >= MIN_CAPABILITY and find_spec(INSTRUCTIONS) is not None


def launch_options(pdl: bool) -> dict[str, bool]:
    """Return the keyword arguments of a launch. Old versions of Triton do not know ``launch_pdl``, so it is left out
    where it would be false.
    """
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def triton_version() -> tuple[int, ...]:
    """Return the first two numbers of Triton's version; (0, 0) where it is not installed."""
    try:
        return tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return 0, 0


def has_gluon() -> bool:
    """Return whether Triton has Gluon as kernels here use it: it is experimental, and older versions differ."""
    return triton_version() >= GLUON_VERSION


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below ``size``."""
    return 1 << max(0, size - 1).bit_length()
