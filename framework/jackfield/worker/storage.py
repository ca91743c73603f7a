"""Allocation of the KV cache from its plan: planes of every layer as views of few large buffers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import torch

from jackfield.errors import ConfigError
from jackfield.interfaces import CacheSpec, Plane
from jackfield.interfaces.cache import DTYPE_BYTES
from jackfield.kv_cache import CachePlan
from jackfield.kv_cache.planning import buffer_pages

Planes = Mapping[str, torch.Tensor]


def allocate_cache(plan: CachePlan, device: torch.device) -> dict[int, Planes]:
    """Return the planes of each layer, ``[num_blocks, *page shape]``.

    Where layer j of all groups stores alike, it shares one contiguous tensor per plane. Otherwise layers share raw
    buffers in which each page holds its planes one after another.
    """
    layers: dict[int, Planes] = {}
    for position, size in enumerate(buffer_pages(plan.groups, plan.block_size)):
        holders = [(g.layers[position], g.specs[position]) for g in plan.groups if position < len(g.layers)]
        if all(spec.same_storage(holders[0][1]) for _, spec in holders):
            planes = {p.name: _plane(p, plan, device) for p in holders[0][1].planes}
            layers.update((layer, planes) for layer, _ in holders)
        else:
            raw = _zeros((plan.num_blocks, size), "uint8", device)
            layers.update((layer, _carve(raw, spec, plan.block_size)) for layer, spec in holders)
    return layers


def _plane(plane: Plane, plan: CachePlan, device: torch.device) -> torch.Tensor:
    shape = (plan.num_blocks, *plane.page_shape(plan.block_size))
    order = plane.order or tuple(range(len(shape)))
    stored = _zeros(tuple(shape[i] for i in order), plane.dtype, device)
    return stored.permute([order.index(i) for i in range(len(shape))])


def _carve(raw: torch.Tensor, spec: CacheSpec, block_size: int) -> Planes:
    views, offset = {}, 0
    for plane in spec.planes:
        shape = plane.page_shape(block_size)
        size = prod(shape) * DTYPE_BYTES[plane.dtype]
        order = plane.order or tuple(range(len(shape) + 1))
        if order[0] != 0:
            raise ConfigError(
                f"plane '{plane.name}' keeps pages inside its memory order: it cannot share pages with other groups",
                field="attention",
                value=plane.order,
                remedy="choose another attention backend for layers of this kind",
            )
        part = raw[:, offset : offset + size].view(getattr(torch, plane.dtype))
        stored = part.view(len(raw), *(shape[i - 1] for i in order[1:]))
        views[plane.name] = stored.permute([order.index(i) for i in range(len(order))])
        # The next plane's elements must not be cut by the end of this one's.
        offset += -(-size // 16) * 16
    return views


def _zeros(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    """Return zeros; on the host from the system's untouched pages, which cost nothing until they are used."""
    kind: torch.dtype = getattr(torch, dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=kind, device=device)
    raw = torch.from_numpy(np.zeros(prod(shape) * kind.itemsize, dtype=np.uint8))
    return raw.view(kind).view(shape)
