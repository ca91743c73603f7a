"""Trees grown from what a model says, against a search over all paths."""

from __future__ import annotations

import itertools

import pytest
import torch

from jackfield_spec_decode.tree_growth import GrowingTree

Paths = dict[tuple[int, ...], float]


def wanted(tables: list[torch.Tensor], row: int, width: int) -> Paths:
    """Return all candidates of a level-by-level search with their values; table d [B, V, V] says what follows each
    token at depth d.
    """
    tips: Paths = {(): 0.0}
    found: Paths = {}
    for table in tables:
        level: Paths = {}
        for path, value in tips.items():
            best = table[row, path[-1] if path else 0].log_softmax(-1).topk(width)
            level |= {(*path, int(t)): value + float(v) for t, v in zip(best.indices, best.values, strict=True)}
        found |= level
        tips = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    return found


@pytest.mark.parametrize(("width", "depth", "count"), [(1, 4, 4), (2, 3, 5), (3, 4, 12), (4, 2, 20), (6, 3, 9)])
def test_the_likeliest_paths_are_drafted(width: int, depth: int, count: int) -> None:
    rows, vocabulary = 3, 6
    tables = list(torch.randn(depth, rows, vocabulary, vocabulary, generator=torch.Generator().manual_seed(4)) * 2)
    tree, last_BW = GrowingTree(width), torch.zeros(rows, 1, dtype=torch.int64)
    every = torch.arange(rows).unsqueeze(1)
    for table in tables:
        behind_BW, above_BW = tree.grow(table[every, last_BW])
        assert above_BW.shape == behind_BW.shape and int(above_BW.max()) < last_BW.shape[1]
        last_BW = behind_BW
    ids_BK, parents_BK = tree.best(count)
    for row in range(rows):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(ids_BK[row].tolist(), parents_BK[row].tolist(), strict=True):
            assert parent < len(paths)
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        reference = wanted(tables, row, width)
        best = sorted(reference, key=lambda path: -reference[path])[:count]
        assert sorted(paths) == sorted(best)


def test_drafts_that_are_worth_the_same_are_still_a_tree() -> None:
    tree, sure = GrowingTree(2), torch.full((1, 1, 4), float("-inf"))
    sure[..., 3] = 0.0
    for _ in range(3):
        ids, _ = tree.grow(sure)
        sure = sure[:, :1].expand(1, ids.shape[1], 4)
    for count in range(1, 8):
        ids_BK, parents_BK = tree.best(count)
        assert all(parent < place for place, parent in enumerate(parents_BK[0].tolist()))
        certain = list(itertools.takewhile(lambda token: token == 3, ids_BK[0].tolist()))
        assert len(certain) >= 1 and ids_BK[0].tolist().count(3) >= min(count, 3)
