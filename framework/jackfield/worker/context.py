"""The forward context of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttendCall:
    """A call of attention that is left out of a recording. Tensors are those of the recording, padded."""

    backend: Any
    q_THD: torch.Tensor
    cache: Mapping[str, torch.Tensor]
    group: str
    out_THD: torch.Tensor


class Recorder(Protocol):
    """Takes calls of attention while a step is recorded."""

    def attend(self, call: AttendCall) -> None:
        """Keep the call, and go on recording behind it."""
        ...


@dataclass(slots=True)
class StepContext:
    """Implements :class:`jackfield.interfaces.ForwardContext`; lives for one step."""

    caches: Mapping[int, Mapping[str, torch.Tensor]]
    metadata_by_group: Mapping[str, Any]
    slots_by_group: Mapping[str, torch.Tensor]
    adapters: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    taps: frozenset[int] = frozenset()
    tapped: dict[int, torch.Tensor] = field(default_factory=dict)
    recorder: Recorder | None = None
    _angles: dict[int, torch.Tensor] = field(default_factory=dict)

    def metadata(self, group: str) -> Any:
        """See ForwardContext."""
        return self.metadata_by_group[group]

    def cache(self, layer: int) -> Mapping[str, torch.Tensor]:
        """See ForwardContext."""
        return self.caches[layer]

    def slots(self, group: str) -> torch.Tensor:
        """See ForwardContext."""
        return self.slots_by_group[group]

    def attend(
        self, backend: Any, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], group: str, out_THD: torch.Tensor
    ) -> None:
        """See ForwardContext."""
        if self.recorder is not None:
            self.recorder.attend(AttendCall(backend, q_THD, cache, group, out_THD))
        else:
            backend.attend(q_THD, cache, self.metadata_by_group[group], out_THD)

    def angles(self, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        """See ForwardContext."""
        key = id(rotary)
        if key not in self._angles:
            self._angles[key] = rotary(positions)
        return self._angles[key]

    def tap(self, layer: int, hidden_TE: torch.Tensor) -> None:
        """See ForwardContext."""
        if layer in self.taps:
            self.tapped[layer] = hidden_TE
