"""What makes a step, how fast is learnt, and how accuracy is counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jackfield.errors import ConfigError
from jackfield.interfaces import Agreement, DraftTrainer, TrainedDraft, TrainingBatch
from jackfield.training import TrainingSettings
from jackfield.training.batches import ROWS, Batch, batches, plan
from jackfield.training.loop import LOWEST, rate
from jackfield.training.measure import measure


def test_batches_hold_every_piece_once_and_no_more_than_they_may() -> None:
    lengths = [3 + at * 7 % 40 for at in range(1300)]
    made = batches(lengths, 160, range(len(lengths)))
    assert sorted(int(at) for batch in made for at in batch) == list(range(1300))
    assert all(max(lengths[at] for at in batch) * len(batch) <= 160 for batch in made)
    padding = sum(max(lengths[at] for at in batch) * len(batch) - sum(lengths[at] for at in batch) for batch in made)
    assert padding < 0.05 * sum(lengths)
    assert max(len(batch) for batch in batches([1] * 1000, 10**6, range(1000))) == ROWS


def test_steps_or_epochs() -> None:
    lengths = [4] * 30
    epoch = len(batches(lengths, 20, range(30)))
    assert len(plan(lengths, 20, 0, None, 3)) == 3 * epoch
    assert len(plan(lengths, 20, 0, 8, 1)) == 8
    first, second = (sorted(at for batch in part for at in batch) for part in _halves(plan(lengths, 20, 0, None, 2)))
    assert first == second == list(range(30))
    one, other = ([batch.tolist() for batch in part] for part in _halves(plan(lengths, 20, 0, None, 2)))
    assert one != other


def _halves(planned: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    return planned[: len(planned) // 2], planned[len(planned) // 2 :]


def test_the_rate_rises_and_falls() -> None:
    rates = [rate(step, 200) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[19] == rates[20] == 1.0
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert LOWEST <= rates[-1] < LOWEST + 0.01
    assert rate(0, 1) == 1.0
    assert rate(99, 5000) == 1.0 and rate(98, 5000) < 1.0


class Given(DraftTrainer):
    """Has the agreements that it is given."""

    def __init__(self, found: list[Agreement]) -> None:
        self.module = torch.nn.Identity()
        self._found = iter(found)

    def losses(self, batch: TrainingBatch) -> Iterator[torch.Tensor]:
        return iter(())

    def agreement(self, batch: TrainingBatch) -> Agreement:
        assert not self.module.training
        return next(self._found)

    def checkpoint(self) -> TrainedDraft:
        return TrainedDraft({}, {})


def test_places_count_where_they_are_known_and_chains_where_all_are() -> None:
    first = Agreement(torch.tensor([[1, 1], [1, 0], [0, 1]]).bool(), torch.ones(3, 2).bool())
    second = Agreement(torch.tensor([[1, 0], [1, 1]]).bool(), torch.tensor([[1, 0], [1, 1]]).bool())
    trainer = Given([first, second])
    batch = TrainingBatch(torch.zeros(1, 1), torch.ones(1), torch.zeros(1, 1, 1))
    found = measure(trainer, [batch, batch])
    assert found.places == pytest.approx((4 / 5, 3 / 4))
    assert (found.accepted, found.rows) == ((2 + 1 + 0 + 2) / 4, 4)
    assert trainer.module.training


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"steps": 0}, "--steps"),
        ({"epochs": 0}, "--epochs"),
        ({"steps": 3, "epochs": 1}, "--steps"),
        ({"batch_tokens": 0}, "--batch-tokens"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"learning_rate": 1.0}, "--learning-rate"),
        ({"holdout": 1.0}, "--holdout"),
        ({"holdout": -0.1}, "--holdout"),
        ({"max_length": 65, "batch_tokens": 64}, "--max-length"),
    ],
)
def test_settings_without_a_meaning_are_refused(wish: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingSettings(**wish).check()  # type: ignore[arg-type]
    assert caught.value.field == field
    assert caught.value.remedy


def test_pieces_fit_target_and_step() -> None:
    assert TrainingSettings().piece_length(512) == 512
    assert TrainingSettings().piece_length(1 << 20) == 1024
    assert TrainingSettings(batch_tokens=300).piece_length(512) == 300
    assert TrainingSettings(max_length=2000).piece_length(4096) == 2000
    TrainingSettings().check()
