"""Norm layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from jackfield.interfaces import Communicator, OutputShard, PendingNorm, RankInfo
from jackfield.layers.parameters import LoadableModule, PlainWeight, ShardedWeight

Ops = Mapping[str, Callable[..., Any]]

GATES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
"""Activations of gates beside a norm."""


class Fed(Protocol):
    """A layer that takes rows."""

    def takes_narrow(self, rows: int) -> bool:
        """Return whether it likes that many rows best in 8-bit floats with a scale each."""
        ...

    def folds(self, op: str, rows: int) -> bool:
        """Return whether it computes an op before it along with its product of that many rows."""
        ...


class RmsNorm(PlainWeight):
    """Root-mean-square norm with an optional offset on the weight (Gemma stores weight - 1). Its results are quantized
    where the layer that it feeds likes that, and left to that layer where it folds the norm into its product and
    nothing else is wanted (``foldable``). Without a weight of its own it has ones.
    """

    weight: torch.Tensor

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        offset: float = 0.0,
        *,
        weight: bool = True,
        foldable: bool = True,
    ) -> None:
        super().__init__(name, {"weight": (size,)} if weight else {}, dtype, device)
        if not weight:
            self.register_buffer("weight", torch.ones(size, dtype=dtype, device=device), persistent=False)
        self.eps = eps
        self._offset = offset
        self._norm = ops["rms_norm"]
        self._add_norm = ops["fused_add_rms_norm"]
        self._norm_quant = ops.get("rms_norm_quant")
        self._add_norm_quant = ops.get("fused_add_rms_norm_quant")
        self._fed: Fed | None = None
        self._foldable = foldable

    def feed(self, layer: Fed) -> None:
        """Say that ``layer`` alone takes what this norm returns."""
        self._fed = layer

    def finalize(self) -> None:
        """Fold the offset into the weight."""
        if self._offset:
            self.weight.data += self._offset
            self._offset = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        """Return the norm over the last dimension."""
        if self._left_to_layer("rms_norm", x):
            return PendingNorm(x, None, None, self.weight, self.eps)
        norm = self._norm_quant if self._norm_quant is not None and self._narrow(x) else self._norm
        return norm(x, self.weight, self.eps)

    def add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        if self._left_to_layer("fused_add_rms_norm", x_TE, residual_TE):
            total_TE = torch.empty_like(x_TE)
            return PendingNorm(x_TE, residual_TE, total_TE, self.weight, self.eps), total_TE
        norm = self._add_norm_quant if self._add_norm_quant is not None and self._narrow(x_TE) else self._add_norm
        pair: tuple[Any, torch.Tensor] = norm(x_TE, residual_TE, self.weight, self.eps)
        return pair

    def _narrow(self, x: torch.Tensor) -> bool:
        return self._fed is not None and self._fed.takes_narrow(len(x))

    def _left_to_layer(self, op: str, *rows: torch.Tensor) -> bool:
        """Return whether the layer that takes the results computes the norm itself."""
        if self._fed is None or not self._foldable or not self._fed.folds(op, len(rows[0])):
            return False
        return all(t.dim() == 2 and t.is_contiguous() and t.dtype == self.weight.dtype for t in rows)


class LayerNorm(PlainWeight):
    """Layer norm (arXiv:1607.06450), with a weight and a bias or without; the weight may have an offset."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        offset: float = 0.0,
        *,
        weight: bool = True,
        bias: bool = True,
    ) -> None:
        wanted = {"weight": weight, "bias": bias}
        super().__init__(name, {key: (size,) for key, there in wanted.items() if there}, dtype, device)
        for key, there in wanted.items():
            if not there:
                self.register_parameter(key, None)
        self.eps = eps
        self._offset = offset

    def load(self, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """Take a weight or a bias; the first checkpoints of BERT call them gamma and beta."""
        return super().load(shard, {"gamma": "weight", "beta": "bias"}.get(suffix, suffix), tensor)

    def feed(self, layer: Fed) -> None:
        """There is no quantizing form of this norm."""

    def finalize(self) -> None:
        """Fold the offset into the weight."""
        if self._offset and self.weight is not None:
            self.weight.data += self._offset
            self._offset = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm over the last dimension."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        total = x_TE + residual_TE
        return self(total), total


class GatedNorm(ShardedWeight):
    """Root-mean-square norm beside a gate, over groups of features (Mamba-2, arXiv:2405.21060; gated delta networks,
    arXiv:2412.06464).

    Args:
        name: module path. shard: of the layer whose outputs are normalized. size: features that are normalized
            together. eps: added to the mean square. activation: of the gate. gate_first: the gate comes before the
            norm. shared: one weight of ``size`` for all groups.
    """

    weight: nn.Parameter

    def __init__(
        self,
        name: str,
        shard: OutputShard,
        size: int,
        eps: float,
        communicator: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        *,
        activation: str = "silu",
        gate_first: bool = True,
        shared: bool = False,
    ) -> None:
        rank = RankInfo(communicator.rank, communicator.size)
        weight = OutputShard("", size, size, may_replicate=True) if shared else shard
        shapes = {"weight": (weight.size,)}
        super().__init__(name, shapes, (weight,), RankInfo() if shared else rank, dtype, device)
        self.eps, self._size, self._gate_first = eps, size, gate_first
        self._act = GATES[activation]
        local = shard.local_size(rank)
        self._sums = communicator if size > local else None
        if self._sums is not None and size != shard.size:
            raise ValueError(f"{name}: a group of {size} features lies on several ranks, but not on all")

    def forward(self, x_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        """Return [T, I] of this rank."""
        wide = torch.promote_types(x_TI.dtype, torch.float32)
        gate = self._act(gate_TI.to(wide))
        x = x_TI.to(wide) * gate if self._gate_first else x_TI.to(wide)
        groups = x.view(len(x), -1, min(self._size, x.shape[-1]))
        groups = groups * torch.rsqrt(self._mean_square(groups) + self.eps)
        y = (groups * self.weight.to(wide).view(-1, groups.shape[-1])).view(x.shape)
        return (y if self._gate_first else y * gate).to(x_TI.dtype)

    def _mean_square(self, x_TGN: torch.Tensor) -> torch.Tensor:
        if self._sums is None:
            return x_TGN.square().mean(-1, keepdim=True)
        return self._sums.all_reduce(x_TGN.square().sum(-1, keepdim=True)) / self._size


class HeadNorm(LoadableModule):
    """A norm over queries or keys with a weight for each feature of each head.

    Heads are cut across ranks as the projection is. The checkpoint may have one vector, one row for each head, or one
    module for each head (a rule with the head's number as its shard). It has no bias.

    Args:
        name: module path. shard: of the projection. size: features normalized together: of one head, or of the whole
            projection, whose sums then run over all ranks. eps: added to the mean square. kind: ``rms`` or ``layer``.
        communicator: of the ranks. dtype, device: of the weight.
    """

    weight: nn.Parameter

    def __init__(
        self,
        name: str,
        shard: OutputShard,
        size: int,
        eps: float,
        kind: str,
        communicator: Communicator,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(name)
        self.eps = eps
        self._size, self._whole = size, shard.size
        self._start, self._stop = shard.slice(RankInfo(communicator.rank, communicator.size))
        self._centered = kind == "layer"
        self._ranks = communicator if size == shard.size and communicator.size > 1 else None
        local = self._stop - self._start
        self.weight = nn.Parameter(torch.empty(local, dtype=dtype, device=device), requires_grad=False)
        self._parts = 1 if size == shard.size else local // size
        self._left = set(range(shard.size // size))
        self._expect("weight")

    def load(self, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """Take the weight of all heads, or of one."""
        if suffix != "weight":
            return False
        first, count = (int(shard) * self._size, self._size) if shard else (0, self._whole)
        flat = self._part(tensor.flatten(), 0, count, 0, count, suffix)
        low, high = max(first, self._start), min(first + count, self._stop)
        if low < high:
            target = self.weight[low - self._start : high - self._start]
            self._copy(target, flat[low - first : high - first], suffix)
        self._left -= {int(shard)} if shard else self._left
        if not self._left:
            self._filled(suffix)
        return True

    def forward(self, x_THD: torch.Tensor) -> torch.Tensor:
        """Return the norm of this rank's heads [T, heads, D]."""
        wide = torch.promote_types(x_THD.dtype, torch.float32)
        x = x_THD.reshape(len(x_THD), self._parts, -1).to(wide)
        if self._centered:
            x = x - self._mean(x)
        x = x * torch.rsqrt(self._mean(x.square()) + self.eps) * self.weight.view(self._parts, -1)
        return x.to(x_THD.dtype).view(x_THD.shape)

    def _mean(self, x_TPN: torch.Tensor) -> torch.Tensor:
        """Return the mean over N, and over all ranks where they share what is normalized."""
        if self._ranks is None:
            return x_TPN.mean(-1, keepdim=True)
        # Ranks that hold copies of a cache head hold equally many of each, so that the mean stays right.
        total = self._ranks.all_reduce(x_TPN.sum(-1, keepdim=True))
        return total / (x_TPN.shape[-1] * self._ranks.size)
