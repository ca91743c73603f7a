"""Moving small arrays between host and device without stopping either."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Transfer:
    """Copies to and from one device.

    Args:
        device: where to. Where it is the host itself, tensors share memory with the arrays.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._local = device.type == "cpu"

    def send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return ``array`` on the device. The copy runs behind what is queued there; the caller may change the array
        at once.
        """
        tensor = torch.from_numpy(array)
        if self._local:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def send_index(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return ``array`` as int64 on the device, for indexing."""
        return self.send(array.astype(np.int64))

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host tensor into which ``tensor`` is being copied; wait for the device before reading it. What the
        caller does to ``tensor`` behind that changes nothing.
        """
        if self._local:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
