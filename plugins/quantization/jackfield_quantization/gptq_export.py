"""GPTQ (arXiv:2210.17323): inputs are rounded one after another, and those that are left make up for what was lost.

Legend: O outputs, I inputs, J groups of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from jackfield.errors import ConfigError
from jackfield.interfaces import Exporter
from jackfield_quantization.calibrated import GptqPlan
from jackfield_quantization.packing import packed_words
from jackfield_quantization.rounding import SCALES, ZERO_POINTS, Rounded, Rounding

NUMBERED = re.compile(r"\.\d+\.")
"""In a module's path: it belongs to a layer, whatever the model calls its layers."""
BLOCK = 128
"""Inputs whose errors are kept back before they go to those behind."""


def rounded(weight_OI: torch.Tensor, moments_II: torch.Tensor, plan: GptqPlan) -> Rounded:
    """Return a matrix in few bits whose products with inputs of such moments are near its own.

    Args:
        weight_OI: the matrix. moments_II: mean product of every two inputs. plan: how.
    """
    weight, moments = weight_OI.float().clone(), moments_II.float().clone()
    idle = moments.diagonal() == 0
    moments.diagonal()[idle] = 1.0
    weight[:, idle] = 0.0  # inputs that were always 0: what they are multiplied by could not be learned from
    order = torch.argsort(moments.diagonal(), descending=True) if plan.reordered else torch.arange(len(idle))
    order = order.to(weight.device)
    weight, moments = weight[:, order], moments[order][:, order]
    numbers, roundings = _spread_errors(weight, _inverse_root(moments, plan.damping), plan)
    back = torch.argsort(order)
    groups = torch.arange(len(order), device=weight.device) // (plan.group or len(order))
    scales, zeros = (torch.stack([getattr(r, name) for r in roundings], 1) for name in ("scale", "zero"))
    return Rounded(numbers[:, back], scales, zeros, groups[back])


def _inverse_root(moments_II: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper Cholesky factor of the damped moments' inverse; more is added until there is one."""
    mean = moments_II.diagonal().mean()
    for times in (1, 10, 100, 1000):
        damped = moments_II.clone()
        damped.diagonal().add_(damping * times * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper: torch.Tensor
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
    raise ConfigError(
        "the moments of a layer's inputs cannot be inverted",
        field="plugins.options.calibrated_gptq.damping",
        value=damping,
        remedy="calibrate with a longer text, or a larger damping",
    )


def _spread_errors(
    weight_OI: torch.Tensor, root_II: torch.Tensor, plan: GptqPlan
) -> tuple[torch.Tensor, list[Rounding]]:
    """Return whole numbers, and the rounding of each group; ``weight`` is overwritten."""
    inputs = weight_OI.shape[1]
    group, numbers, roundings = plan.group or inputs, torch.empty_like(weight_OI), list[Rounding]()
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        errors = torch.empty_like(weight_OI[:, start:stop])
        for at in range(start, stop):
            if at % group == 0:
                # Columns of the group behind this block have not been told of this block's errors yet.
                ahead = weight_OI[:, at : at + group].clone()
                ahead[:, max(0, stop - at) :] -= errors[:, : at - start] @ root_II[start:at, max(at, stop) : at + group]
                roundings.append(Rounding.of(ahead, plan))
            column = weight_OI[:, at]
            numbers[:, at] = roundings[-1].numbers(column)
            errors[:, at - start] = (column - roundings[-1].meaning(numbers[:, at])) / root_II[at, at]
            weight_OI[:, at:stop] -= errors[:, at - start, None] * root_II[at, at:stop]
        weight_OI[:, stop:] -= errors @ root_II[start:stop, stop:]
    return numbers, roundings


class GptqExporter(Exporter):
    """GPTQ checkpoints; with zero points in their second form, in which a zero point of 0 can be told."""

    calibrates: ClassVar[bool] = True

    def __init__(self, plan: GptqPlan) -> None:
        self._plan = plan

    def config(self, plain: Sequence[str]) -> Mapping[str, object]:
        """See Exporter."""
        plan = self._plan
        inside = [module for module in plain if NUMBERED.search(module)]
        return {
            "quant_method": "gptq",
            "bits": plan.bits,
            "group_size": plan.group or -1,
            "desc_act": plan.reordered,
            "sym": plan.symmetric,
            "lm_head": False,
            "damp_percent": plan.damping,
            "true_sequential": False,
            "checkpoint_format": "gptq" if plan.symmetric else "gptq_v2",
            "dynamic": {f"-:^{re.escape(module)}$": {} for module in inside},
        }

    def calibrated(
        self, weight_OI: torch.Tensor, moments_II: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """See Exporter."""
        made, bits = rounded(weight_OI, moments_II, self._plan), self._plan.bits
        zeros = made.zeros - (1 if self._plan.symmetric else 0)
        tensors = {
            "qweight": packed_words(made.numbers, bits).t().contiguous(),
            ZERO_POINTS: packed_words(zeros.t(), bits),
            SCALES: made.scales.t().contiguous().half(),
            "g_idx": made.groups.int(),
        }
        return tensors, made.meaning().to(weight_OI.dtype)
