"""Parts of the training of EAGLE-3 and Medusa: tokens of the head, sizes, goals, and attention when it is unrolled."""

from __future__ import annotations

import pytest
import torch

from jackfield.errors import ConfigError
from jackfield.interfaces import AttentionGroup, Settings, TextConfig, TrainerEnv, TrainingBatch
from jackfield_spec_decode.eagle_network import LayerSizes, Seen, UnrolledAttention, rotated
from jackfield_spec_decode.eagle_trainer import frequent, layer_sizes
from jackfield_spec_decode.training_goals import Places, ahead, greedy, reached

SIZES = LayerSizes(width=8, features=24, num_heads=4, num_kv_heads=2, head_size=4, inner=12, eps=1e-6, theta=100.0)


def test_frequent_tokens_by_id() -> None:
    counts = torch.tensor([0, 5, 1, 9, 1, 0])
    assert frequent(counts, 2).tolist() == [1, 3]
    assert frequent(counts, 3).tolist() == [1, 2, 3]
    assert frequent(counts, None).tolist() == list(range(6))
    many = torch.zeros(40000, dtype=torch.int64)
    many[7::300] = 1
    chosen = frequent(many, None)
    assert len(chosen) == 192 and set(range(7, 40000, 300)) <= set(chosen.tolist())
    assert len(frequent(torch.ones(40000, dtype=torch.int64), None)) == 16384


@pytest.mark.parametrize("wanted", [0, 7, -1])
def test_no_such_number_of_tokens(wanted: int) -> None:
    with pytest.raises(ConfigError) as caught:
        frequent(torch.ones(6, dtype=torch.int64), wanted)
    assert (caught.value.field, caught.value.value) == ("--draft-vocab", wanted)


class Echo:
    """A target whose greedy token behind a state is the state's largest feature."""

    def embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        return torch.zeros((*ids_N.shape, 8))

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return hidden_NE

    def head(self, ids_N: torch.Tensor | None = None) -> torch.Tensor:
        return torch.eye(8) if ids_N is None else torch.eye(8)[ids_N]


def env(groups: tuple[AttentionGroup, ...], **keys: object) -> TrainerEnv:
    config = TextConfig(vocab_size=8, hidden_size=128, num_layers=3, max_position=64)
    options = Settings({"intermediate_size": None})
    counts = torch.ones(8, dtype=torch.int64)
    return TrainerEnv(target=Echo(), config=config, keys=keys, groups=groups, counts=counts, settings=options)


def test_the_layer_is_like_the_targets() -> None:
    states = AttentionGroup(name="states", kind="mamba2", layers=(0,))
    latent = AttentionGroup(name="mla", kind="mla", layers=(1,), num_heads=4, num_kv_heads=4, head_size=24)
    full = AttentionGroup(name="full", kind="full", layers=(2,), num_heads=6, num_kv_heads=3, head_size=10)
    found = layer_sizes(env((states, latent, full), intermediate_size=50, rope_parameters={"rope_theta": 5.0}), 3)
    assert (found.num_heads, found.num_kv_heads, found.head_size) == (6, 3, 10)
    assert (found.inner, found.theta, found.features) == (50, 5.0, 384)
    bare = layer_sizes(env((states, latent)), 2)
    assert (bare.num_heads, bare.num_kv_heads, bare.head_size) == (2, 2, 64)
    assert (bare.inner, bare.theta, bare.eps, bare.features) == (384, 10000.0, 1e-6, 256)


def test_rows_and_places_are_of_one_order() -> None:
    batch = TrainingBatch(torch.zeros(3, 5, dtype=torch.int64), torch.tensor([5, 1, 3]), torch.rand(3, 5, 8))
    places = Places.of(batch)
    assert places.document.tolist() == [0, 0, 0, 0, 2, 2]
    assert places.token.tolist() == [1, 2, 3, 4, 1, 2]
    assert reached(batch, 3).int().tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]
    best = greedy(Echo(), batch)
    assert best[0, 1:].tolist() == batch.hidden[0, 1:].argmax(-1).tolist()
    assert not best[:, 0].any() and not best[1].any()


def test_ahead() -> None:
    values = torch.arange(1, 7).view(2, 3)
    assert ahead(values, 1).tolist() == [[2, 3, 0], [5, 6, 0]]
    assert not ahead(values, 3).any() and not ahead(values, 5).any()


def test_rotation_keeps_distances() -> None:
    """What two rotated vectors say of one another depends on how far they are apart."""
    x, y = torch.randn(2, 1, 1, 1, 4, generator=torch.Generator().manual_seed(1)).unbind()
    angles = torch.arange(12)[:, None] * torch.tensor([1.0, 0.1])
    scores = [(rotated(x, angles[at][None]) * rotated(y, angles[at + 3][None])).sum() for at in (0, 4, 8)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3))
    assert not torch.isclose(scores[0], (x * y).sum())


def test_unrolled_attention_is_attention_over_what_the_cache_holds() -> None:
    torch.manual_seed(2)
    attention, length, seen = UnrolledAttention(SIZES), 6, Seen([], [])
    inputs = torch.randn(3, 2, length, 16)
    with torch.no_grad():
        found = [attention(x_BLW, seen) for x_BLW in inputs]
        for row in range(length):
            # The drafter's own sequence: first-step inputs up to the row, then the row's own inputs of later steps.
            line = torch.cat((inputs[0, :, : row + 1], inputs[1:, :, row].transpose(0, 1)), 1)
            whole = attention(line, Seen([], []))
            for step in range(3):
                torch.testing.assert_close(found[step][:, row], whole[:, row + step], rtol=1e-4, atol=1e-5)
