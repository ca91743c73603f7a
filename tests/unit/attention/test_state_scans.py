"""Recurrences against their definitions, token by token in float64."""

from __future__ import annotations

import pytest
import torch

from jackfield_attention.state_scans import (
    decayed_attention,
    decayed_step,
    delta_attention,
    delta_step,
    selective_scan,
    selective_step,
)

LENGTHS = (1, 2, 31, 32, 33, 64, 65, 200)
H, K, V, INNER, N = 3, 8, 5, 6, 4


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decays(*shape: int, seed: int) -> torch.Tensor:
    """Return logarithms of decays from nearly none to nearly all."""
    return -draw(*shape, seed=seed).mul(2).exp()


def close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def selective_definition(a, x, dt, b, c, state):  # type: ignore[no-untyped-def]
    outputs = []
    for t in range(len(x)):
        state = torch.exp(dt[t][:, None] * a) * state + (dt[t] * x[t])[:, None] * b[t]
        outputs.append((state * c[t]).sum(1))
    return torch.stack(outputs), state


def decayed_definition(q, k, v, g, state):  # type: ignore[no-untyped-def]
    outputs = []
    for t in range(len(q)):
        state = g[t].exp()[:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
        outputs.append((state * q[t][:, :, None]).sum(1))
    return torch.stack(outputs), state


def delta_definition(q, k, v, g, beta, state):  # type: ignore[no-untyped-def]
    outputs = []
    identity = torch.eye(K, dtype=torch.float64)
    for t in range(len(q)):
        gate = g[t].expand(H, K).exp()[:, :, None] * identity  # diagonal decays
        erase = identity - beta[t][:, None, None] * k[t][:, :, None] * k[t][:, None, :]
        state = erase @ (gate @ state) + beta[t][:, None, None] * k[t][:, :, None] * v[t][:, None, :]
        outputs.append((state * q[t][:, :, None]).sum(1))
    return torch.stack(outputs), state


def selective_inputs(count: int) -> tuple[torch.Tensor, ...]:
    dt = draw(count, INNER, seed=2).exp()
    return draw(count, INNER, seed=1), dt, draw(count, N, seed=3), draw(count, N, seed=4)


def attention_inputs(count: int) -> tuple[torch.Tensor, ...]:
    return draw(count, H, K, seed=5), draw(count, H, K, seed=6), draw(count, H, V, seed=7), decays(count, H, seed=8)


def delta_inputs(count: int, width: int) -> tuple[torch.Tensor, ...]:
    q, k, v, _ = attention_inputs(count)
    k = k / k.norm(dim=-1, keepdim=True)
    return q, k, v, decays(count, H, width, seed=9), draw(count, H, seed=10).sigmoid()


@pytest.mark.parametrize("count", LENGTHS)
def test_a_selective_scan_is_its_recurrence(count: int) -> None:
    a, state = decays(INNER, N, seed=11), draw(INNER, N, seed=12)
    inputs = selective_inputs(count)
    close(selective_scan(a, *inputs, state), selective_definition(a, *inputs, state))


@pytest.mark.parametrize("count", LENGTHS)
def test_decayed_attention_is_its_recurrence(count: int) -> None:
    inputs, state = attention_inputs(count), draw(H, K, V, seed=12)
    close(decayed_attention(*inputs, state), decayed_definition(*inputs, state))


@pytest.mark.parametrize("width", [1, K], ids=["gdn", "kda"])
@pytest.mark.parametrize("count", LENGTHS)
def test_the_delta_rule_in_chunks_is_its_recurrence(count: int, width: int) -> None:
    inputs, state = delta_inputs(count, width), draw(H, K, V, seed=12)
    close(delta_attention(*inputs, state), delta_definition(*inputs, state))


@pytest.mark.parametrize("cut", [1, 17, 64])
def test_states_hand_on_what_was_seen(cut: int) -> None:
    a, inputs = decays(INNER, N, seed=11), selective_inputs(90)
    both = [
        (lambda parts, s: selective_scan(a, *parts, s), inputs, draw(INNER, N, seed=12)),
        (lambda parts, s: decayed_attention(*parts, s), attention_inputs(90), draw(H, K, V, seed=12)),
        (lambda parts, s: delta_attention(*parts, s), delta_inputs(90, 1), draw(H, K, V, seed=12)),
    ]
    for work, whole, start in both:
        first, state = work(tuple(x[:cut] for x in whole), start)
        second, last = work(tuple(x[cut:] for x in whole), state)
        close((torch.cat((first, second)), last), work(whole, start))


def test_a_step_of_many_sequences_is_a_scan_of_one_token_each() -> None:
    a = decays(INNER, N, seed=11)
    cases = [
        (lambda *x: selective_step(a, *x), lambda *x: selective_scan(a, *x), selective_inputs(4), (INNER, N)),
        (decayed_step, decayed_attention, attention_inputs(4), (H, K, V)),
        (delta_step, delta_attention, delta_inputs(4, 1), (H, K, V)),
        (delta_step, delta_attention, delta_inputs(4, K), (H, K, V)),
    ]
    for step, scan, inputs, shape in cases:
        states = draw(4, *shape, seed=13)
        outputs, after = step(*inputs, states)
        for row in range(4):
            close((outputs[row : row + 1], after[row]), scan(*(x[row : row + 1] for x in inputs), states[row]))
