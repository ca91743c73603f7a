"""Puts a checkpoint tensor into the shape and order that a module wants, as its weight rule says."""

from __future__ import annotations

import torch

from jackfield.errors import CheckpointError
from jackfield.interfaces import RowOrder, RowSlice, WeightRule
from jackfield.layers.parameters import LoadableModule


def arrange(tensor: torch.Tensor, rule: WeightRule, module: LoadableModule, suffix: str) -> torch.Tensor:
    """Return the tensor transposed, cut and reordered; a view where that is possible.

    Args:
        tensor: as the checkpoint has it. rule: what to do. module: who takes it. suffix: last part of its name.

    Raises:
        CheckpointError: the tensor is not made of the rows that the rule speaks of, or they cannot be told apart.
    """
    if rule.unit_rows and suffix == "weight":
        if not tensor.is_floating_point():
            raise _unfit("rows that are to have length 1 are packed", rule.source)
        tensor = torch.nn.functional.normalize(tensor, dim=-1)
    place = module.row_place(rule.shard, suffix)
    # The rule speaks of the matrix; packed ones are stored in one way, whatever plain ones are.
    if rule.transposed and tensor.dim() == 2 and suffix == rule.suffix:
        tensor = tensor.t()
    if place is None:
        if (rule.cut is not None or rule.rows is not None) and module.is_opaque(rule.shard, suffix):
            raise _unfit("its rows cannot be told apart as they are packed", rule.cut or rule.rows)
        return tensor
    dim, pack = place
    repeat = module.row_repeat(rule.shard, suffix)
    if repeat > 1:
        rows = rule.cut.total * rule.cut.groups if rule.cut else module.outputs(rule.shard)
        tensor = repeated_rows(tensor, repeat, dim, rows)
    if rule.cut is not None:
        tensor = cut_rows(tensor, rule.cut, dim, pack)
    if rule.rows is None:
        return tensor
    if pack != 1:
        raise _unfit(f"rows are packed {pack} to a number and cannot be put into another order", rule.rows)
    return reorder_rows(tensor, rule.rows, dim)


def repeated_rows(tensor: torch.Tensor, repeat: int, dim: int, rows: int) -> torch.Tensor:
    """Return numbers that stand for ``repeat`` rows once for each row; the last block of ``rows`` may be cut short."""
    wide = tensor.repeat_interleave(repeat, dim)
    return wide.narrow(dim, 0, rows) if rows and 0 <= wide.shape[dim] - rows < repeat else wide


def cut_rows(tensor: torch.Tensor, cut: RowSlice, dim: int = 0, pack: int = 1) -> torch.Tensor:
    """Return the rows that ``cut`` names; see :class:`RowSlice`. ``pack`` rows share a stored number."""
    if tensor.shape[dim] * pack != cut.total * cut.groups:
        raise _unfit(f"{tensor.shape[dim] * pack} rows instead of {cut.groups} times {cut.total}", cut)
    if any(row % pack for row in (cut.start, cut.stop, cut.total)):
        raise _unfit(f"rows are packed {pack} to a number, and a fused part does not begin with one", cut)
    parts = torch.unflatten(tensor, dim, (cut.groups, cut.total // pack))
    return parts.narrow(dim + 1, cut.start // pack, (cut.stop - cut.start) // pack).flatten(dim, dim + 1)


def reorder_rows(tensor: torch.Tensor, order: RowOrder, dim: int = 0) -> torch.Tensor:
    """Return ``tensor`` with rows put into the module's order; see :class:`RowOrder`. A matrix with one row for each
    unit (the weights of norms over heads) is one long column to it.
    """
    if order.kind != "interleaved_pairs":
        raise CheckpointError("unknown row order", field="weight_map.rows", value=order.kind)
    if dim == 0 and tensor.dim() == 2 and tensor.shape[0] == order.units:
        return reorder_rows(tensor.flatten(), order).view(tensor.shape)
    head, rest = divmod(tensor.shape[dim], order.units)
    size = order.size or head - order.start
    if rest or size < 0 or order.start + size > head or size % 2:
        raise _unfit(f"{tensor.shape[dim]} rows are not {order.units} heads with {order.size or 'all'} paired", order)
    heads = torch.unflatten(tensor, dim, (order.units, head))
    before, paired, others = torch.split(heads, [order.start, size, head - size - order.start], dim + 1)
    pairs = torch.unflatten(paired, dim + 1, (size // 2, 2))
    halves = pairs.transpose(dim + 1, dim + 2).flatten(dim + 1, dim + 2)
    return torch.cat((before, halves, others), dim + 1).flatten(dim, dim + 1)


def _unfit(message: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"a checkpoint tensor does not fit its weight rule: {message}",
        field="weight_map",
        value=value,
        remedy="is the checkpoint of another size than its config says, or quantized in a way that fused layers bar?",
    )
