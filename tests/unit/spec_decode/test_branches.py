"""Drafts that branch: what they see of one another, and that what comes out follows the target."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from markov_world import START, MarkovDrafter, MarkovWorld, chi_square, frequencies, joint

from jackfield.interfaces import DraftBatch, Drafts
from jackfield.protocol import SchedulerOutput
from jackfield.sampling.verification import walk_drawn, walk_equal
from jackfield.worker.trees import ancestors, checked_parents, depths, first_paths, pruned, step_tree

VOCAB, TOKENS, DRAWS, MANY = 4, 4, 16_000, 100_000
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
DRAFT = TARGET * 0.6 + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
WIDE = (-1, -1, 0, 0, 1, 2, 2)
TREES: dict[str, tuple[int, ...]] = {
    "two of one": (-1, -1),
    "a chain": (-1, 0, 1),
    "wide": WIDE,
    "children before uncles": (-1, 0, 0, -1, 3, 3),
}
Trees = st.lists(st.integers(-1, 30), min_size=1, max_size=30).map(
    lambda parents: [min(parent, index - 1) for index, parent in enumerate(parents)]
)


def path(parents: list[int], index: int) -> list[int]:
    return [] if index < 0 else [*path(parents, parents[index]), index]


@given(Trees)
def test_ancestors_are_those_on_the_way_to_the_last_token(parents: list[int]) -> None:
    table = np.array([parents], dtype=np.int32)
    for index, (bits, deep) in enumerate(zip(ancestors(table)[0].tolist(), depths(table)[0].tolist(), strict=True)):
        way = path(parents, index)
        assert bits == sum(1 << one for one in way) and deep == len(way)


@settings(max_examples=200)
@given(Trees, st.data())
def test_what_is_left_of_a_tree_is_one_and_the_rest_comes_behind(parents: list[int], data: st.DataObject) -> None:
    count = len(parents)
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    ids = np.arange(100, 100 + count, dtype=np.int32)[None]
    found, moved, order = pruned(ids, np.array([parents], dtype=np.int32), np.array([kept]))
    left = [index for index in range(count) if all(kept[one] for one in path(parents, index))]
    assert found[0].tolist() == [100 + index for index in left] + [-1] * (count - len(left))
    assert order[0, : len(left)].tolist() == left
    for place, index in enumerate(left):
        assert [left[one] for one in path(moved[0].tolist(), place)] == path(parents, index)
    assert (moved[0] < np.arange(count)).all()


@given(Trees)
def test_the_first_path_is_of_first_children(parents: list[int]) -> None:
    wanted, last = [], -1
    while last in parents:
        last = parents.index(last)
        wanted.append(last)
    assert first_paths(np.array([parents]))[0].nonzero()[0].tolist() == wanted


def test_a_steps_tokens_see_their_ancestors_and_all_that_was_known() -> None:
    parents = np.array([[-1, 0, 1, 2], [-1, -1, 1, 2], [-1, 0, 0, 1]], dtype=np.int32)
    plan = SchedulerOutput(
        0,
        np.arange(3, dtype=np.int32),
        np.array([7, 4, 0], dtype=np.int32),
        np.array([1, 5, 6], dtype=np.int32),
        np.ones(3, dtype=np.bool_),
        drafts=np.zeros((3, 4), dtype=np.int32),
        num_drafts=np.array([0, 3, 4], dtype=np.int32),
        draft_parents=parents,
    )
    tree = step_tree(plan)
    assert tree is not None
    assert tree.base.tolist() == [8, 5, 6, 6, 6, 6, 1, 2, 2, 2, 2, 2]
    assert tree.bits.tolist() == [0, 0, 0, 0b1, 0b10, 0b110, 0, 0, 0b1, 0b11, 0b101, 0b1011]
    assert tree.positions.tolist() == [7, 4, 5, 6, 6, 7, 0, 1, 2, 3, 3, 4]
    plan.draft_parents = None
    assert step_tree(plan) is None


@pytest.mark.parametrize(
    ("parents", "error"),
    [([[0, 0]], ValueError), ([[-2, 0]], ValueError), ([[-1]], TypeError), ([[-1.0, 0.0]], TypeError)],
)
def test_parents_that_are_none_are_refused(parents: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="parent"):
        checked_parents(parents, (1, 2))


def test_the_walk_follows_what_the_target_says() -> None:
    drafts = torch.tensor([[5, 6, 7, 8, 9, 8], [5, 6, 7, 8, 9, 8]])
    parents = torch.tensor([[-1, -1, 1, 1, 3, 2]]).expand(2, 6)
    sampled = torch.tensor([[6, 0, 8, 0, 9, 0, 0], [6, 0, 8, 0, 1, 0, 0]])
    kept = walk_equal(drafts, parents, sampled, torch.tensor([6, 6]))
    assert [row.nonzero().flatten().tolist() for row in kept] == [[1, 3, 4], [1, 3]]
    assert walk_equal(drafts, parents, sampled, torch.tensor([4, 1])).sum(1).tolist() == [2, 0]


class TreeDrafter(MarkovDrafter):
    """Draws every draft behind its parent: by itself (``own``), without the tokens of the siblings before it where
    ``apart``; else by the engine's hand.
    """

    parents: ClassVar[tuple[int, ...]] = WIDE
    apart: ClassVar[bool] = False

    def propose(self, batch: DraftBatch) -> Drafts:
        assert batch.token_ids is not None and batch.draw is not None
        last = torch.from_numpy(batch.token_ids[batch.slots, batch.lengths - 1].astype(np.int64))
        ids: list[torch.Tensor] = []
        shares: list[torch.Tensor] = []
        for index, parent in enumerate(self.parents):
            logits = self._table[last if parent < 0 else ids[parent]].clone()
            if self.apart:
                for one in range(index):
                    if self.parents[one] == parent:
                        logits.scatter_(1, ids[one].unsqueeze(1), float("-inf"))
            shares.append(logits.softmax(-1))
            drawn = torch.multinomial(shares[-1], 1, generator=self._generator).squeeze(1) if self._own else None
            ids.append(batch.draw(logits, index) if drawn is None else drawn)
        parents = np.broadcast_to(np.array(self.parents), (len(batch.slots), len(self.parents)))
        return Drafts(torch.stack(ids, 1), parents, torch.stack(shares, 1) if self._own else None)


def world_of(tree: str, *, own: bool = False, apart: bool = False, count: int = DRAWS, **options: Any) -> MarkovWorld:
    kind = type("Made", (TreeDrafter,), {"parents": TREES[tree], "apart": apart})
    width = options.pop("width", len(TREES[tree]))
    return MarkovWorld(TARGET, kind(DRAFT, width, own=own), count, width, **options)


def expected(temperature: float = 1.0) -> Any:
    return joint(
        lambda before: (TARGET[before[-1] if before else START].double() / temperature).softmax(-1).numpy(),
        VOCAB,
        TOKENS,
    )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("how", ["by the engine", "by itself", "none twice"])
def test_sequences_over_several_rounds_follow_the_target(tree: str, how: str) -> None:
    world = world_of(tree, own=how != "by the engine", apart=how == "none twice")
    tokens = world.run(TOKENS)
    assert world.speculation.drafter is not None, "the drafter was switched off"
    statistic, limit = chi_square(frequencies(tokens, VOCAB), expected())
    assert statistic < limit
    assert 0.2 < world.kept[0] < 2.9, "drafts must be kept and refused for this to mean anything"


@pytest.mark.slow
def test_a_hundred_thousand_trees_follow_the_target() -> None:
    """As many draws as chains get, on a tree whose siblings are drawn apart."""
    world = world_of("wide", own=True, apart=True, count=MANY)
    statistic, limit = chi_square(frequencies(world.run(TOKENS), VOCAB), expected())
    assert statistic < limit and 0.2 < world.kept[0] < 2.9


def test_request_parameters_hold_for_drafts_that_branch() -> None:
    tokens = world_of("wide", temperature=0.6).run(TOKENS)
    statistic, limit = chi_square(frequencies(tokens, VOCAB), expected(0.6))
    assert statistic < limit


def test_a_tree_that_is_cut_follows_the_target() -> None:
    """The engine takes fewer drafts than there are: what they were drawn from goes with those that are left."""
    world = world_of("children before uncles", own=True, width=4)
    statistic, limit = chi_square(frequencies(world.run(TOKENS), VOCAB), expected())
    assert statistic < limit and world.kept[0] > 0.3


def test_the_test_would_see_siblings_tried_by_the_whole_of_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sibling by p itself, and not by what those before it left of p, gives another distribution."""
    import jackfield.worker.speculation as module

    def forgetful(p: Any, q: Any, drafts: Any, parents: Any, counts: Any, u: Any, last: Any) -> Any:
        kept, rows = torch.zeros(drafts.shape, dtype=torch.bool), torch.arange(len(drafts))
        at = torch.full_like(counts, -1)
        for index in range(drafts.shape[1]):
            ratio = p[rows, at + 1, drafts[:, index]] / q[rows, index, drafts[:, index]]
            mine = (parents[:, index] == at) & (u[:, index] < ratio)
            kept[:, index], at = mine, torch.where(mine, index, at)
        return kept, walk_drawn(
            p[rows, at + 1].unsqueeze(1), q[:, :0], drafts[:, :0], parents[:, :0], counts, u[:, :0], last
        )[1]

    monkeypatch.setattr(module, "walk_drawn", forgetful)
    tokens = world_of("two of one", count=20_000).run(TOKENS)
    statistic, limit = chi_square(frequencies(tokens, VOCAB), expected())
    assert statistic > 3 * limit


def test_more_branches_keep_more_drafts() -> None:
    kept = {}
    for name in ("a chain", "wide"):
        world = world_of(name, own=True, apart=True, count=8000, max_tokens=9)
        world.drafts, world.parents = world.speculation.propose(world.slots, world.known, None) or (None, None)
        world.round()
        kept[name] = world.kept[0]
    assert kept["wide"] > kept["a chain"] + 0.1


def test_a_draft_that_is_certain_changes_no_draw() -> None:
    class Certain(TreeDrafter):
        silent: ClassVar[bool] = False

        def propose(self, batch: DraftBatch) -> Drafts:
            assert batch.token_ids is not None
            last = torch.from_numpy(batch.token_ids[batch.slots, batch.lengths - 1].astype(np.int64))
            ids = self._table[last].argsort(descending=True)
            likely = torch.stack((ids[:, 0], ids[:, 1], *(self._table[ids[:, at]].argmax(-1) for at in (0, 1))), 1)
            parents = np.broadcast_to(np.array([-1, -1, 0, 1]), likely.shape)
            return Drafts(torch.full_like(likely, -1) if self.silent else likely, parents)

    class Silent(Certain):
        silent = True

    alone = MarkovWorld(TARGET, Silent(DRAFT, 4), 500, 4).run(6)
    world = MarkovWorld(TARGET, Certain(DRAFT, 4), 500, 4)
    assert (world.run(6) == alone).all()
    assert world.kept[0] > 0.5


def test_requests_whose_logits_are_edited_keep_the_first_path() -> None:
    """Edits look at the tokens before a place, which only a chain has one behind the other."""
    world = world_of("children before uncles", count=50)
    world.state.edits[:25] = True
    world.drafts, world.parents = world.speculation.propose(world.slots, world.known, None) or (None, None)
    assert world.drafts is not None and world.parents is not None
    assert (world.drafts[:25] >= 0).sum(1).tolist() == [2] * 25
    assert (world.drafts[25:] >= 0).sum(1).tolist() == [6] * 25
    assert (world.parents[:25, :2] == [-1, 0]).all()
