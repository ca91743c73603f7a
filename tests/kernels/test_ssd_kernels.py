"""Mamba-2 over chunks in Triton, and its convolution: equal to the torch reference on whole sequences in float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ssd_case import BOUND, SHAPES, Ssd, convolved, draw, mixed, worst

from jackfield.interfaces import AttentionEnv, AttentionStep
from jackfield.interfaces.plugin import Settings
from jackfield.testing.state_cases import Piece, make_step
from jackfield_attention import triton_ssd, triton_states_layer
from jackfield_attention.torch_mamba import TorchMambaBackend
from jackfield_attention.triton_ssd import MOST_WALK_KEYS, heads_each, walks_alone
from jackfield_attention.triton_state_chunks import LARGE, SMALL, chunks_of
from jackfield_attention.triton_states import TritonStatesBackend

DEVICE = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_equal_the_reference(name: str, dtype: str) -> None:
    shape = replace(SHAPES[name], dtype=dtype)
    drawn = draw(shape)
    wanted = mixed(TorchMambaBackend, shape.whole(), drawn.wide(), DEVICE)
    assert worst(mixed(TritonStatesBackend, shape, drawn, DEVICE), wanted) < BOUND[dtype]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.keys <= MOST_WALK_KEYS])
def test_walks_that_write_outputs_equal_the_reference(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_states_layer, "chunk_rows", lambda env: LARGE)
    monkeypatch.setattr(triton_ssd, "WALKS_PER_CORE", 0)
    monkeypatch.setattr(triton_ssd, "_outputs", None)
    shape = replace(SHAPES[name], dtype=dtype)
    drawn = draw(shape)
    wanted = mixed(TorchMambaBackend, shape.whole(), drawn.wide(), DEVICE)
    assert worst(mixed(TritonStatesBackend, shape, drawn, DEVICE), wanted) < BOUND[dtype]


def test_walks_write_outputs_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not walks_alone(10_000, 64, 132)
    monkeypatch.setattr(triton_ssd, "WALKS_PER_CORE", 2)
    found = [walks_alone(*case) for case in ((264, 128, 132), (263, 128, 132), (264, 129, 132))]
    assert found == [True, False, False]


@pytest.mark.parametrize("name", ["state 128", "in place", "cut after 64"])
def test_large_chunks_equal_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_states_layer, "chunk_rows", lambda env: LARGE)
    shape = SHAPES[name]
    drawn = draw(shape)
    wanted = mixed(TorchMambaBackend, shape.whole(), drawn, DEVICE)
    assert worst(mixed(TritonStatesBackend, shape, drawn, DEVICE), wanted) < BOUND["float32"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["odd sizes", "in place", "cut after 7", "token by token", "pairs"])
def test_convolutions_equal_the_reference(name: str, dtype: str) -> None:
    shape = replace(SHAPES[name], dtype=dtype)
    drawn = draw(shape)
    wanted = convolved(TorchMambaBackend, shape.whole(), drawn.wide(), DEVICE)
    assert worst(convolved(TritonStatesBackend, shape, drawn, DEVICE), wanted) < BOUND[dtype]


def test_chunks_are_the_same_wherever_a_sequence_is_cut() -> None:
    whole = Ssd(heads=2, keys=16, values=16, lengths=(150,))
    drawn = draw(whole)
    wanted = mixed(TritonStatesBackend, whole, drawn, DEVICE)
    for cut in (1, 7, 64, 65, 149):
        assert worst(mixed(TritonStatesBackend, replace(whole, cut=cut), drawn, DEVICE), wanted) < BOUND["float32"], cut


def test_small_steps_keep_their_digits() -> None:
    """dt is a softplus: its value is far below 1 where what comes in is far below 0."""
    shape = Ssd(heads=2, keys=16, values=16, lengths=(70,))
    drawn = draw(shape)
    constants = {**drawn.constants, "dt_bias": torch.tensor([-12.0, 25.0]), "d": torch.zeros(2)}
    drawn = replace(drawn, constants=constants)
    wanted = mixed(TorchMambaBackend, shape, drawn, DEVICE).outputs[0]
    found = mixed(TritonStatesBackend, shape, drawn, DEVICE).outputs[0]
    for head in range(2):
        assert float((found - wanted)[:, head].norm() / wanted[:, head].norm()) < BOUND["float32"]


def test_states_may_leave_the_range_of_float16() -> None:
    shape = Ssd(heads=2, keys=16, values=16, lengths=(150,), dtype="float16", rate=0.01)
    drawn = draw(shape)
    rows = drawn.rows[0].clone()
    rows[:, :32] *= 1000
    rows[:, 48:] *= 0.001
    constants = {**drawn.constants, "dt_bias": torch.full((2,), 3.0), "d": torch.zeros(2)}
    drawn = replace(drawn, rows=[rows], constants=constants)
    wanted = mixed(TorchMambaBackend, shape.whole(), drawn.wide(), DEVICE)
    assert float(wanted.left[0].abs().max()) > 66_000
    assert worst(mixed(TritonStatesBackend, shape, drawn, DEVICE), wanted) < BOUND["float16"]


def test_nothing_is_left_where_no_page_is_named() -> None:
    step = make_step([Piece(0, 0, 3), Piece(1, 0, 70)], [(-1, -1), (-1, 2)], DEVICE)
    for plane in _one_step(step)[1].values():
        assert torch.equal(plane[[0, 1, 3]], torch.full_like(plane[[0, 1, 3]], 5.0)) and (plane[2] != 5).all()


def test_the_host_may_know_bounds_alone() -> None:
    step = make_step([Piece(0, 0, 3), Piece(1, 0, 60)], [(-1, 1), (-1, 2)], DEVICE)
    wanted, left = _one_step(step)
    bounds = replace(step, query_start_host=np.array([0, 70, 270], dtype=np.int32))
    found, also_left = _one_step(bounds)
    assert torch.equal(found, wanted)
    for name, plane in left.items():
        assert torch.equal(also_left[name], plane)


def _one_step(step: AttentionStep) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return outputs of ones by ``mix`` and ``convolve``, and the planes behind the step, which were full of fives."""
    request = Ssd(heads=2, keys=16, values=16).request(DEVICE)
    env = AttentionEnv(request, TritonStatesBackend.cache_specs(request)[0], 16, DEVICE, Settings())
    planes = {one.name: torch.full((4, *one.page_shape(1)), 5.0) for one in env.spec.planes}
    layer, metadata = TritonStatesBackend.layer(env, 0), TritonStatesBackend.metadata_builder(env).build(step)
    x, dt, b = (torch.ones(step.num_tokens, *size) for size in ((2, 16), (2,), (1, 16)))
    out, rows = torch.zeros_like(x), torch.ones(step.num_tokens, 64)
    constants = dict.fromkeys(("a", "d", "dt_bias"), -torch.ones(2))
    layer.mix({"x": x, "dt": dt, "b": b, "c": b, **constants}, planes, metadata, out)
    sums = torch.zeros_like(rows)
    layer.convolve(rows, torch.ones(64, 4), None, planes, metadata, sums)
    return torch.cat((out.flatten(1), sums), 1), planes


def test_the_table_of_chunks() -> None:
    pieces = [Piece(0, 5, 6), Piece(1, 0, 65), Piece(2, 7, 9), Piece(3, 0, 64)]
    step = make_step(pieces, [(-1, i) for i in range(4)], DEVICE)
    chunks = chunks_of(step, SMALL, DEVICE)
    assert chunks is not None
    assert chunks.table.tolist() == [[1, 0], [1, 64], [2, 0], [3, 0]]
    assert chunks.owners.tolist() == [[1, 0], [2, 2], [3, 3]]
    assert chunks.table.dtype == torch.int32 and chunks.table.is_contiguous() and chunks.owners.is_contiguous()
    alone = make_step(pieces[:1], [(-1, 0)], DEVICE)
    assert chunks_of(alone, SMALL, DEVICE) is None


def test_programs_share_products_where_there_are_enough() -> None:
    assert [heads_each(chunks, 80, 132) for chunks in (128, 32, 8)] == [8, 4, 2]
