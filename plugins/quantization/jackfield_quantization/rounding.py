"""Whole numbers in groups of inputs, with scales and zero points: what writers of packed checkpoints have in common.

Legend: O outputs, I inputs, J groups of inputs, G inputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jackfield.errors import ConfigError
from jackfield.interfaces import ParameterHolder
from jackfield_quantization.calibrated import CalibratedPlan
from jackfield_quantization.unquantized_scheme import DenseScheme

ZERO_POINTS = "qzeros"
SCALES = "scales"


class UnwrittenScheme(DenseScheme):
    """Stands for a layer that is to be written; nothing is run with it.

    Args:
        method: that writes it. format: that it writes.
    """

    def __init__(self, method: str, format: str) -> None:
        self._method, self._format = method, format

    def finalize(self, layer: ParameterHolder) -> None:
        """Refuse to run.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self._method} writes checkpoints and runs none",
            field="quantization.force",
            value=self._method,
            remedy=f"write one with 'jackfield quantize --format {self._format}', and run that",
        )


@dataclass(frozen=True, slots=True)
class Rounding:
    """Scales and zero points of groups, [O] or [O, J], and the largest number."""

    scale: torch.Tensor
    zero: torch.Tensor
    largest: int

    @classmethod
    def of(cls, weight: torch.Tensor, plan: CalibratedPlan, kept: float | torch.Tensor = 1.0) -> Rounding:
        """Return that which covers all numbers of groups [..., G], or the share ``kept`` of their span; its scales are
        such as float16 holds.
        """
        largest = (1 << plan.bits) - 1
        low, high = torch.aminmax(weight, dim=-1)
        low, high = low.clamp(max=0), high.clamp(min=0)
        if plan.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        low, high = low * kept, high * kept
        scale = ((high - low) / largest).clamp(min=2.0**-24).half().float()
        zero = (
            torch.full_like(scale, (largest + 1) // 2) if plan.symmetric else (-low / scale).round().clamp(0, largest)
        )
        return cls(scale, zero, largest)

    def numbers(self, weight: torch.Tensor) -> torch.Tensor:
        """Return whole numbers of one input of each group."""
        return (weight / self.scale).add_(self.zero).round_().clamp_(0, self.largest)

    def meaning(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return what they stand for."""
        return (numbers - self.zero).mul_(self.scale)

    def wide(self) -> Rounding:
        """Return the same for whole groups [..., G]."""
        return Rounding(self.scale.unsqueeze(-1), self.zero.unsqueeze(-1), self.largest)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix of whole numbers [O, I], its scales and zero points [O, J], and the group of each input [I]."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    def meaning(self) -> torch.Tensor:
        """Return the float32 matrix that it stands for."""
        return (self.numbers - self.zeros[:, self.groups]) * self.scales[:, self.groups]


def to_nearest(weight_OI: torch.Tensor, plan: CalibratedPlan, kept: float | torch.Tensor = 1.0) -> Rounded:
    """Return a matrix rounded group by group; ``kept``, for all or [O, J]: the share of a group's span that is covered,
    what lies outside being cut off.
    """
    weight_OJG = in_groups(weight_OI, plan)
    rule, inputs = Rounding.of(weight_OJG, plan, kept), weight_OI.shape[1]
    groups_I = torch.arange(inputs, device=weight_OI.device) // weight_OJG.shape[2]
    return Rounded(rule.wide().numbers(weight_OJG).flatten(1), rule.scale, rule.zero, groups_I)


def nearest(weight_OI: torch.Tensor, plan: CalibratedPlan, kept: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Return what :func:`to_nearest` stands for, in less time."""
    weight_OJG = in_groups(weight_OI, plan)
    rule = Rounding.of(weight_OJG, plan, kept).wide()
    return rule.meaning(rule.numbers(weight_OJG)).flatten(1)


def in_groups(weight_OI: torch.Tensor, plan: CalibratedPlan) -> torch.Tensor:
    """Return a matrix as float32 [O, J, G]."""
    return torch.unflatten(weight_OI.float(), 1, (-1, plan.group or weight_OI.shape[1]))
