"""AWQ (arXiv:2306.00978): inputs that are large are multiplied up before rounding, and what comes before is divided.

Legend: O outputs, I inputs, J groups of inputs, G inputs of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from jackfield.interfaces import Exporter
from jackfield_quantization.calibrated import AwqPlan
from jackfield_quantization.packing import AWQ_ORDER, packed_words
from jackfield_quantization.rounding import SCALES, ZERO_POINTS, Rounded, nearest, to_nearest

STEPS = 20
"""Powers of the inputs' sizes that are tried, besides 0."""
FLOOR = 1e-4
"""Least size of an input, as a share of the largest: those that never come would have factors of 0."""
SHARES = tuple(1 - step / 20 for step in range(1, 11))
"""Of a group's span: what is tried besides all of it."""


def product_errors(errors_OI: torch.Tensor, moments_II: torch.Tensor) -> torch.Tensor:
    """Return the mean square [O] of what errors of a matrix make of its products with inputs of such moments."""
    return (errors_OI @ moments_II).mul_(errors_OI).sum(1)


def best_factors(weights: Sequence[torch.Tensor], moments_II: torch.Tensor, plan: AwqPlan) -> torch.Tensor:
    """Return factors [I] on the columns of matrices with which rounding costs least; all 1 where none is better.

    They are powers of the inputs' sizes (the root of the mean square), between 0 and 1.
    """
    weight_OI = torch.cat([weight.float() for weight in weights])
    sizes_I = moments_II.diagonal().clamp(min=0).sqrt()
    sizes_I = sizes_I.clamp(min=FLOOR * float(sizes_I.max()))
    found_I, least = torch.ones_like(sizes_I), float("inf")
    for step in range(STEPS + 1):
        factors_I = sizes_I ** (step / STEPS)
        factors_I = factors_I / (factors_I.max() * factors_I.min()).sqrt()
        errors_OI = nearest(weight_OI * factors_I, plan).div_(factors_I).sub_(weight_OI)
        cost = float(product_errors(errors_OI, moments_II).sum())
        if cost < least:
            found_I, least = factors_I, cost
    return found_I


def clipped(weight_OI: torch.Tensor, moments_II: torch.Tensor, plan: AwqPlan) -> Rounded:
    """Return a matrix rounded to the nearest, with as much of each group's span cut off as makes its products nearest.
    No output's products are worse than with nothing cut off.
    """
    weight_OI, size = weight_OI.float().contiguous(), plan.group or weight_OI.shape[1]
    count = weight_OI.shape[1] // size
    blocks_JGG = moments_II.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)

    def errors(kept: float | torch.Tensor) -> torch.Tensor:
        return nearest(weight_OI, plan, kept).sub_(weight_OI)

    def costs(share: float) -> torch.Tensor:
        errors_JOG = errors(share).view(-1, count, size).transpose(0, 1).contiguous()
        costs_JO: torch.Tensor = (errors_JOG @ blocks_JGG).mul_(errors_JOG).sum(-1)
        return costs_JO.t()

    least_OJ = costs(1.0)
    kept_OJ = torch.ones_like(least_OJ)
    for share in SHARES:
        costs_OJ = costs(share)
        kept_OJ = torch.where(costs_OJ < least_OJ, share, kept_OJ)
        least_OJ = torch.minimum(costs_OJ, least_OJ)
    # Groups were judged one by one, but what they do to an output adds up, or cancels.
    before_O, after_O = (product_errors(errors(kept), moments_II) for kept in (1.0, kept_OJ))
    return to_nearest(weight_OI, plan, torch.where((after_O < before_O).unsqueeze(1), kept_OJ, 1.0))


class AwqExporter(Exporter):
    """AWQ checkpoints in the ``gemm`` version."""

    calibrates: ClassVar[bool] = True
    scales: ClassVar[bool] = True

    def __init__(self, plan: AwqPlan) -> None:
        self._plan = plan

    def config(self, plain: Sequence[str]) -> Mapping[str, object]:
        """See Exporter."""
        return {
            "quant_method": "awq",
            "bits": self._plan.bits,
            "group_size": self._plan.group or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(plain),
        }

    def factors(self, weights: Sequence[torch.Tensor], moments_II: torch.Tensor) -> torch.Tensor:
        """See Exporter."""
        return best_factors(weights, moments_II, self._plan)

    def calibrated(
        self, weight_OI: torch.Tensor, moments_II: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """See Exporter."""
        plan = self._plan
        made = clipped(weight_OI, moments_II, plan) if plan.clip else to_nearest(weight_OI, plan)
        tensors = {
            "qweight": packed_words(made.numbers.t(), plan.bits, AWQ_ORDER),
            ZERO_POINTS: packed_words(made.zeros.t(), plan.bits, AWQ_ORDER),
            SCALES: made.scales.t().contiguous().half(),
        }
        return tensors, made.meaning().to(weight_OI.dtype)
