"""Moving tokens in caches of every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from jackfield.errors import PluginError
from jackfield.interfaces import BLOCK, CacheSpec, Plane
from jackfield.kv_cache import CacheGroup
from jackfield.testing.attention_cases import CPU, Query, empty_plane, make_step
from jackfield.worker.compaction import Compactor
from jackfield.worker.transfer import Transfer

PLANES = {
    "heads outside tokens": Plane("k", "float32", (2, BLOCK, 3)),
    "tokens outside heads": Plane("k", "bfloat16", (BLOCK, 2, 3)),
    "pages inside": Plane("k", "float32", (2, BLOCK, 3), order=(1, 0, 2, 3)),
    "latents": Plane("latent", "float16", (BLOCK, 5)),
    "bytes": Plane("k", "float8_e4m3fn", (2, BLOCK, 4)),
    "packed": Plane("k", "uint8", (2, BLOCK, 2)),
    "scales": Plane("k_scale", "float32", (2, BLOCK)),
}
SIZE = 4


@pytest.mark.parametrize("name", PLANES)
def test_all_of_a_token_moves_and_nothing_else(name: str) -> None:
    plane = PLANES[name]
    pages = np.array([5, 2, 7, 1, 4, 3], dtype=np.int32)
    step = make_step([Query(3, 4), Query(6, 5)], SIZE, pages)
    cache = empty_plane(plane, 9, SIZE, CPU, fill=0.0)
    tokens = cache.movedim(1 + plane.shape.index(BLOCK), 1)
    width = tokens[0, 0].numel()
    numbers = torch.arange(9 * SIZE * width, dtype=torch.float32).remainder(100).view(tokens.shape)
    tokens.copy_(numbers.to(cache.dtype))
    before = tokens.float().clone()
    compactor = Compactor(
        [CacheGroup("g", (3,), (CacheSpec((plane,)),))], {3: {plane.name: cache}}, SIZE, Transfer(CPU)
    )
    # Of the second sequence place 9 goes to 8, and 10 to 9: what is read was there before anything was written.
    compactor.move([step], np.array([1, 1, 0]), np.array([9, 10, 6]), np.array([8, 9, 5]))
    wanted = before.clone()
    table = step.block_table.tolist()
    for row, source, target in ((1, 9, 8), (1, 10, 9), (0, 6, 5)):
        wanted[table[row][target // SIZE], target % SIZE] = before[table[row][source // SIZE], source % SIZE]
    assert torch.equal(tokens.float(), wanted)
    assert not torch.equal(wanted, before)


def test_groups_move_by_their_own_tables() -> None:
    plane = PLANES["latents"]
    steps = [make_step([Query(2, 2)], SIZE, np.array([page], dtype=np.int32)) for page in (1, 2)]
    shared = {plane.name: torch.arange(3 * SIZE * 5.0).view(3, SIZE, 5)}
    before = shared[plane.name].clone()
    groups = [CacheGroup(name, (layer,), (CacheSpec((plane,)),)) for layer, name in enumerate("ab")]
    compactor = Compactor(groups, {0: shared, 1: shared}, SIZE, Transfer(CPU))
    compactor.move(steps, np.array([0]), np.array([3]), np.array([2]))
    for page in (1, 2):
        assert torch.equal(shared[plane.name][page, 2], before[page, 3])
    assert torch.equal(shared[plane.name][0], before[0])


def test_planes_without_tokens_are_refused() -> None:
    plane = replace(PLANES["scales"], shape=(2, 8))
    with pytest.raises(PluginError, match="'k_scale' keeps nothing for each token alone"):
        Compactor(
            [CacheGroup("g", (0,), (CacheSpec((plane,)),))],
            {0: {plane.name: torch.zeros(1, 2, 8)}},
            SIZE,
            Transfer(CPU),
        )
