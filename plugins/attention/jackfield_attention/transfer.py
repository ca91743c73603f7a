"""Host arrays of a step, on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def sent(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the array on the device, without waiting for the copy where memory can be pinned."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
