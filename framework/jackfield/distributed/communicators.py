"""The two communicators of the core: one rank alone, and torch.distributed. Platforms may bring faster ones."""

from __future__ import annotations

import torch
import torch.distributed as dist


class SingleCommunicator:
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor


class TorchCommunicator:
    """Collectives of a ``torch.distributed`` process group; ``None`` is the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, in place."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the ranks' tensors concatenated along ``dim``."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return rank ``source``'s tensor, in place."""
        dist.broadcast(tensor, src=source, group=self._group)
        return tensor
