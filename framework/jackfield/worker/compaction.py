"""Moving what tokens keep in the cache: of drafts that branch those that were kept, to where the text has them.

What a layer keeps of a token depends on the token's position in the text and on what came before it, and on neither of
them does it depend where it is stored. So moving it is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from jackfield.errors import PluginError
from jackfield.interfaces import BLOCK, AttentionStep
from jackfield.kv_cache import CacheGroup
from jackfield.worker.transfer import Transfer

Planes = Mapping[str, torch.Tensor]


class Compactor:
    """Moves tokens of sequences, in all layers.

    Args:
        groups: all cache groups, in the order of a step's. caches: planes by layer. block_size: tokens in a block.
        transfer: to the device.

    Raises:
        PluginError: a plane keeps nothing for each token alone.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        caches: Mapping[int, Planes],
        block_size: int,
        transfer: Transfer,
    ) -> None:
        self._block, self._transfer = block_size, transfer
        self._planes = [
            [
                (caches[layer][plane.name], token_dim(plane.name, plane.shape))
                for layer, spec in zip(group.layers, group.specs, strict=True)
                for plane in spec.planes
            ]
            for group in groups
        ]

    def move(
        self,
        steps: Sequence[AttentionStep],
        rows: npt.NDArray[Any],
        sources: npt.NDArray[Any],
        targets: npt.NDArray[Any],
    ) -> None:
        """Move tokens of sequences ``rows`` of a step from places to others, [N] each; all are read before any is
        written.
        """
        send = self._transfer.send_index
        rows_N, places = send(rows), [send(one) for one in (sources, targets)]
        for step, planes in zip(steps, self._planes, strict=False):
            source, target = (self._cells(step, rows_N, place) for place in places)
            # Layers of several groups may lie in one buffer, but never in one page.
            for plane, dim in planes:
                cells = raw(plane).movedim(dim, 1)
                cells[target] = cells[source]

    def _cells(
        self, step: AttentionStep, rows_N: torch.Tensor, places_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return step.block_table[rows_N, places_N // self._block].long(), places_N % self._block


def token_dim(name: str, shape: Sequence[int]) -> int:
    """Return which dimension of a plane ``[pages, *shape]`` counts the tokens of a block.

    Raises:
        PluginError: none does.
    """
    if BLOCK not in shape:
        raise PluginError(
            f"plane '{name}' keeps nothing for each token alone, so that drafts that branch cannot be moved in it",
            remedy="draft chains, or choose another attention backend",
        )
    return 1 + tuple(shape).index(BLOCK)


def raw(plane: torch.Tensor) -> torch.Tensor:
    """Return a plane as numbers that every device can index: 8-bit floats as bytes."""
    return plane.view(torch.uint8) if plane.is_floating_point() and plane.element_size() == 1 else plane
