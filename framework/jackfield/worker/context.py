"""The forward context of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Work = Callable[[Any, int], None]
"""Takes the metadata of a group of layers, and how many of its tokens are real."""


class Recorder(Protocol):
    """Takes what is left out of a recording while a step is recorded."""

    def leave_out(self, group: str, work: Work) -> None:
        """Keep the work, and go on recording behind it."""
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

    def unrecorded(self, group: str, work: Work) -> None:
        """See ForwardContext."""
        if self.recorder is not None:
            self.recorder.leave_out(group, work)
        else:
            work(self.metadata_by_group[group], len(self.slots_by_group[group]))

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
