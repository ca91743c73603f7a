"""Choosing tokens, and what is left of latent attention where all are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.interfaces import AttentionEnv, Settings
from jackfield.layers.composite import Composite
from jackfield.testing.attention_cases import CPU, STEPS, Query, make_step, settings_of
from jackfield.testing.attention_shapes import INDEXED, LATENT
from jackfield.testing.latent_cases import latent_attention
from jackfield_attention.torch_mla import TorchMlaBackend
from jackfield_attention.torch_mla_sparse import TorchMlaSparseBackend
from jackfield_attention.torch_mla_sparse_layer import NOBODY, SparseMlaLayer, SparseQuery, largest

LOW = float("-inf")


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([LOW, -1.0, 0.0, 0.5, 2.0]), min_size=7, max_size=7), min_size=1, max_size=4
    ),
    count=st.integers(1, 9),
)
def test_the_largest_are_chosen_and_of_equal_ones_the_first(rows: list[list[float]], count: int) -> None:
    found = largest(torch.tensor(rows), count).tolist()
    for row, places in zip(rows, found, strict=True):
        seen = [place for place, score in enumerate(row) if score > LOW]
        best = sorted(sorted(seen, key=lambda place: (-row[place], place))[:count])
        assert places == best + [NOBODY] * (min(count, len(row)) - len(best))


@pytest.mark.parametrize("kind", list(STEPS))
def test_it_is_latent_attention_where_all_are_chosen(kind: str) -> None:
    everything = replace(INDEXED, extra={**INDEXED.extra, "index_topk": 100})
    found = latent_attention(TorchMlaSparseBackend, everything, STEPS[kind], CPU)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    # As many as the longest sequence has but one: the other way through the code, with the same result.
    longest = max(query.new + query.old for query in STEPS[kind])
    shorter = replace(INDEXED, extra={**INDEXED.extra, "index_topk": max(1, longest - 1)})
    other = latent_attention(TorchMlaSparseBackend, shorter, STEPS[kind], CPU)
    torch.testing.assert_close(*other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("numbers", [1, 40, 700, 1 << 24])
def test_rows_may_be_computed_in_any_parts(numbers: int) -> None:
    options = {
        **TorchMlaSparseBackend.options,
        "part_numbers": replace(TorchMlaSparseBackend.options["part_numbers"], default=numbers),
    }
    backend = type("Cut", (TorchMlaSparseBackend,), {"options": options})
    found, wanted = latent_attention(backend, INDEXED, STEPS["mixed"], CPU)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_index_keys_are_stored_as_narrow_as_latents(kind: str) -> None:
    narrow = replace(INDEXED, cache_dtype=kind)
    (spec,) = TorchMlaSparseBackend.cache_specs(narrow)
    assert [plane.dtype for plane in spec.planes] == [kind, kind] and spec.page_bytes(16) == 16 * (16 + 4 + 8)
    assert not TorchMlaSparseBackend.check(narrow)
    found, wanted = latent_attention(TorchMlaSparseBackend, narrow, [Query(1, 3), Query(5, 2)], CPU)
    # Nothing is left out in so short sequences, so that only the types differ.
    bound = {"float8_e4m3fn": 0.1, "float8_e5m2": 0.2}[kind]
    assert 1e-3 < float((found - wanted).norm() / wanted.norm()) < bound


def test_what_is_chosen_follows_the_keys_that_were_written() -> None:
    (spec,) = TorchMlaSparseBackend.cache_specs(INDEXED)
    env = AttentionEnv(INDEXED, spec, 4, CPU, Settings({**settings_of(TorchMlaSparseBackend).values}))
    layer, step = SparseMlaLayer(env), make_step([Query(16)], 4, torch.arange(1, 9).int().numpy())
    cache = {"index": torch.full((9, 4, 8), float("nan"))}
    keys = torch.zeros(16, 8)
    keys[[2, 5, 11], 0] = torch.tensor([3.0, 2.0, 1.0])
    slots = step.slots.clone()
    slots[15] = -1  # not written: nobody may look at it but token 15 itself
    layer.write_index(keys, cache, slots)
    query = SparseQuery(0, 15, step.block_table[0], 16, step.positions[:15])
    weight = torch.zeros(15, 20)
    weight[:, 0] = 1.0
    q = torch.zeros(15, 20, 8)
    q[:, 0, 0] = 1.0
    chosen = layer.choose_in(q, weight, cache, query)
    assert chosen[14].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 11]
    assert chosen[4].tolist() == [0, 1, 2, 3, 4, *[NOBODY] * 4]


class Parts:
    """One backend for prompts and again for single tokens."""

    def __init__(self, backend: Any) -> None:
        self.options, self.cache_specs = backend.options, backend.cache_specs
        self._parts = Composite(backend, backend)

    def metadata_builder(self, env: AttentionEnv) -> Any:
        return self._parts.metadata_builder(env)

    def layer(self, env: AttentionEnv, index: int) -> Any:
        return self._parts.layer(env, index)


@pytest.mark.parametrize("kind", list(STEPS))
@pytest.mark.parametrize(("backend", "request_"), [(TorchMlaBackend, LATENT), (TorchMlaSparseBackend, INDEXED)])
def test_phases_may_have_backends_of_their_own(backend: Any, request_: Any, kind: str) -> None:
    found, wanted = latent_attention(Parts(backend), request_, STEPS[kind], CPU)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
