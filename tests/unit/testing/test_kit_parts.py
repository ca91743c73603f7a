"""Parts of the kit that its conformance classes lean on."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from jackfield.interfaces import FAMILIES
from jackfield.testing import __all__ as names
from jackfield.testing import ranks
from jackfield.testing.attention_cases import Query, Shape, make_case, reference, written
from jackfield.testing.ranks import ThreadCommunicator, on_ranks
from jackfield.testing.samples import SAMPLES
from jackfield.testing.state_cases import schedule
from jackfield.testing.statistics import assert_distributed


def test_the_kit_is_light_until_it_is_used() -> None:
    code = "import sys, jackfield.testing; print({'torch', 'pytest', 'hypothesis', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_name_is_there_and_unknown_ones_are_not() -> None:
    import jackfield.testing as kit

    assert all(isinstance(getattr(kit, name), type) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kit.Nothing


def test_every_family_has_samples() -> None:
    assert SAMPLES.keys() == FAMILIES.keys()


PROBABILITIES = np.array([0.5, 0.3, 0.15, 0.05, 0.0])


def test_draws_of_the_distribution_pass() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        counts = generator.multinomial(2000, PROBABILITIES).astype(np.float64)
        assert_distributed(counts, PROBABILITIES)


@pytest.mark.parametrize(
    "counts", [[1100, 500, 300, 100, 0], [1000, 600, 300, 99, 1], [2000, 0, 0, 0, 0]], ids=["biased", "one", "all"]
)
def test_others_do_not(counts: list[float]) -> None:
    with pytest.raises(AssertionError):
        assert_distributed(np.array(counts, dtype=np.float64), PROBABILITIES)


def test_ranks_meet() -> None:
    def work(communicator: ThreadCommunicator) -> torch.Tensor:
        mine = torch.full((2, 1), float(communicator.rank + 1))
        total = communicator.all_reduce(mine)
        first = communicator.broadcast(mine.clone(), source=2)
        return torch.cat((total, communicator.all_gather(mine, dim=1), first), dim=1)

    wanted = torch.tensor([[6.0, 1.0, 2.0, 3.0, 3.0]] * 2)
    assert all(torch.equal(found, wanted) for found in on_ranks(3, work))


def test_a_rank_that_fails_lets_the_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(communicator: ThreadCommunicator) -> torch.Tensor:
        if communicator.rank == 1:
            raise ValueError("boom")
        return communicator.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="boom"):
        on_ranks(2, work)
    assert ranks.BLOCK == 16


def test_pieces_of_sequences_add_up() -> None:
    steps = list(schedule([5, 1, 4], [(2, 4), (), (3,)]))
    assert [[(p.sequence, p.start, p.stop) for p in step] for step in steps] == [
        [(1, 0, 1), (0, 0, 2), (2, 0, 3)],
        [(2, 3, 4), (0, 2, 4)],
        [(0, 4, 5)],
    ]


def test_the_reference_is_softmax_attention() -> None:
    from broken_plugins import Attention

    case = make_case(Attention, Shape(ratio=1), [Query(6)], seed=2)
    q, k, v = (x.transpose(0, 1).double() for x in (case.q_THD, case.k_TKD, case.v_TKV))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(reference(case), wanted.transpose(0, 1))


def test_what_a_write_changes_is_seen() -> None:
    from broken_plugins import Attention

    case = make_case(Attention, Shape(), [Query(3)], seed=2)
    changed = written(Attention, case, case.step.slots)
    assert all(plane.sum() == 3 * 2 * 8 for plane in changed.values())
    nothing = written(Attention, case, torch.full_like(case.step.slots, -1))
    assert not any(plane.any() for plane in nothing.values())
