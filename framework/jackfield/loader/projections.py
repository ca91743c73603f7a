"""Loads linear layers that lie in folders of their own, behind a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from jackfield.checkpoint import module_facts, open_tensors
from jackfield.errors import CheckpointError
from jackfield.interfaces import Projection
from jackfield.layers.activation import PlainActivation
from jackfield.loader.weights import to_torch


def load_projection(projection: Projection, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a layer [R, inputs] -> [R, outputs] in float32.

    Raises:
        CheckpointError: its tensors are not those that its configuration promises.
    """
    facts = module_facts(Path(projection.folder))
    promised: dict[str, tuple[int, ...]] = {"linear.weight": (projection.outputs, projection.inputs)}
    if projection.bias:
        promised["linear.bias"] = (projection.outputs,)
    found = {name: tensor.shape for name, tensor in facts.tensors.items()}
    if found != promised:
        raise CheckpointError(
            "a dense module does not hold the tensors that its configuration promises",
            field=projection.folder,
            value=found,
            remedy=f"it should hold {promised}",
        )
    source = open_tensors(facts)
    tensors = {name: to_torch(source.get(name), facts.tensors[name].dtype) for name in promised}
    weight, bias = (
        tensors[name].to(device, torch.float32, copy=True) if name in tensors else None
        for name in ("linear.weight", "linear.bias")
    )
    assert weight is not None, "compared above"
    activation = PlainActivation(projection.activation or "linear")

    def apply(rows_RE: torch.Tensor) -> torch.Tensor:
        return activation(F.linear(rows_RE.float(), weight, bias))

    return apply
