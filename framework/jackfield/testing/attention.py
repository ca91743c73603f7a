"""Conformance of attention backends: right numbers for every layer they accept, over caches full of NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jackfield.interfaces import AttentionBackend, AttentionEnv, AttentionRequest, HostLengths, RankInfo
from jackfield.interfaces.attention import GraphSupport
from jackfield.testing.attention_cases import (
    STEPS,
    Case,
    Query,
    copy_cache,
    layout_reasons,
    make_case,
    reference,
    run,
    run_rank,
    settings_of,
    spec_for,
    with_cache,
    written,
)
from jackfield.testing.attention_shapes import (
    ENCODER,
    INDEXED,
    LATENT,
    STATE_SHAPES,
    Shape,
    attention_samples,
    state_request,
)
from jackfield.testing.bench import Bench
from jackfield.testing.common import PluginConformance
from jackfield.testing.latent_cases import encoder_attention, latent_attention
from jackfield.testing.state_cases import (
    Inputs,
    convolution,
    definition,
    make_inputs,
    run_convolution,
    run_states,
)

SHAPES = st.builds(
    Shape,
    kv_heads=st.sampled_from([1, 2, 3]),
    ratio=st.sampled_from([1, 2, 4, 7]),
    head_size=st.sampled_from([8, 8, 16, 20, 4]),
    value_size=st.sampled_from([8, 8, 16, 12]),
    block_size=st.sampled_from([1, 4, 8, 16, 16, 32, 7, 64]),
    window=st.one_of(st.none(), st.none(), st.integers(1, 40)),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
)
QUERIES = st.one_of(
    st.builds(Query, st.just(1), st.integers(0, 150)),  # decode
    st.builds(Query, st.integers(2, 8), st.integers(0, 90)),  # verification of drafts
    st.builds(Query, st.integers(1, 70)),  # prefill
    st.builds(Query, st.integers(9, 50), st.integers(1, 80)),  # a chunk after others
)
# Inherited tests run in a class of their own for each plugin, and what their fixtures give never changes.
UNCHECKED = [HealthCheck.differing_executors, HealthCheck.function_scoped_fixture]


def _branching(parents: list[int], tail: int, old: int) -> Query:
    """Return a query whose drafts have these parents, each cut to one before it, behind ``tail`` known tokens."""
    cut = tuple(min(parent, index - 1) for index, parent in enumerate(parents))
    return Query(tail + len(cut), old, cut)


TREES = st.builds(
    _branching, st.lists(st.integers(-1, 20), min_size=1, max_size=24), st.integers(1, 3), st.integers(0, 90)
)
WIDE = (-1, -1, -1, 0, 0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 8, 8, 10, 11, 12)
BRANCHES: Mapping[str, Sequence[Query]] = {
    "two branches": [Query(3, 5, (-1, -1)), Query(4, 0, (-1, 0, 0))],
    "a chain": [Query(6, 10, (-1, 0, 1, 2, 3))],
    "wide": [Query(1 + len(WIDE), 17, WIDE), Query(2 + len(WIDE), 0, WIDE)],
    "as large as may be": [Query(64, 40, tuple((index - 1) // 2 for index in range(63)))],
    "beside others": [Query(1, 30), Query(4, 9), Query(5, 33, (-1, -1, 1, 1)), Query(30), Query(20, 9, WIDE)],
}
RANDOM = settings(max_examples=25, deadline=None, suppress_health_check=UNCHECKED)

SPECIAL: Mapping[str, Shape] = {
    "softcap": Shape(softcap=0.5, window=9),
    "large softcap": Shape(softcap=30.0),
    "alibi": Shape(alibi=True),
    "alibi in a window": Shape(alibi=True, window=9),
    "sinks": Shape(sinks=True),
    "sinks in a window": Shape(sinks=True, window=9, ratio=4),
    "smaller values": Shape(value_size=4),
    "larger values": Shape(value_size=16),
    "one head": Shape(kv_heads=1, ratio=1),
    "64": Shape(head_size=64, value_size=64, block_size=16),
    "80": Shape(head_size=80, value_size=80, block_size=16),
    "128": Shape(head_size=128, value_size=128, block_size=32),
    "chunked_local": Shape(window=16, chunked=True),
    "chunked_local, odd": Shape(window=7, chunked=True, block_size=16),
    "dual_chunk": Shape(dual_chunk=16),
    "dual_chunk, odd": Shape(dual_chunk=7, block_size=16, ratio=3),
    "dual_chunk of one token": Shape(dual_chunk=1, kv_heads=1, value_size=12),
    "dual_chunk, one chunk alone": Shape(dual_chunk=512),
}
"""Layers with what some models have."""
LENGTHS = (1, 5, 70, 33, 2)
CUTS: Mapping[str, Sequence[Sequence[int]]] = {
    "whole": ((), (), (), (), ()),
    "chunks": ((), (2,), (40, 64), (1, 32), (1,)),
    "token by token at the end": ((), (3, 4), (67, 68, 69), (30, 31, 32), (1,)),
}


class AttentionConformance(PluginConformance):
    """Steps of every kind against a reference that loops over tokens; writes touch their slots and nothing else."""

    family: ClassVar[str] = "attention_backends"
    tolerances: ClassVar[Mapping[str, float]] = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
    """Largest absolute and relative error by computation type."""
    cache_tolerances: ClassVar[Mapping[str, float]] = {
        "float8_e4m3fn": 0.15,
        "float8_e5m2": 0.3,
        "int8": 0.03,
        "int4": 0.4,
    }
    """The same by storage type, where that is narrower."""

    def check(self, bench: Bench, shape: Shape, batch: Sequence[Query], seed: int = 0, factor: float = 1.0) -> None:
        """Compare one step with the reference, where the backend accepts the layer or one of other sizes."""
        if (fitting := fit(bench, shape)) is None:
            return
        case = make_case(bench.plugin, fitting, batch, seed, device=bench.device)
        case.q_THD *= factor
        self.compare(case, run(bench.plugin, case), 10.0 if factor > 1 else 1.0)

    def compare(self, case: Case, found: torch.Tensor, slack: float = 1.0) -> None:
        """Compare with the reference."""
        shape = case.shape
        bound = self.cache_tolerances.get(shape.cache_dtype, self.tolerances[shape.dtype]) * slack
        torch.testing.assert_close(found.double(), reference(case), rtol=bound, atol=bound)

    @RANDOM
    @given(shape=SHAPES, batch=st.lists(QUERIES, min_size=1, max_size=6), seed=st.integers(0, 1000))
    def test_random_steps(self, bench: Bench, shape: Shape, batch: list[Query], seed: int) -> None:
        """Any mix of prefill, chunks, verification and decode, in blocks of any accepted size."""
        self.check(bench, shape, batch, seed)

    @pytest.mark.parametrize("kind", list(STEPS))
    @pytest.mark.parametrize("window", [None, 1, 7, 16])
    @pytest.mark.parametrize("block_size", [4, 16])
    def test_each_kind_of_step(self, bench: Bench, kind: str, window: int | None, block_size: int) -> None:
        """One of each kind of step, with and without windows."""
        self.check(bench, Shape(window=window, block_size=block_size), STEPS[kind])

    @pytest.mark.parametrize("name", list(SPECIAL))
    def test_special_layers(self, bench: Bench, name: str) -> None:
        """Soft caps, linear biases, sinks, chunks, head sizes: right where they are accepted."""
        self.check(bench, SPECIAL[name], STEPS["mixed"])

    @pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
    def test_other_types(self, bench: Bench, dtype: str) -> None:
        """Other computation types."""
        self.check(bench, Shape(dtype=dtype, block_size=16, head_size=16, value_size=16), STEPS["mixed"])

    @pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2", "int8", "int4"])
    def test_narrow_caches(self, bench: Bench, stored: str) -> None:
        """Narrower storage types."""
        self.check(bench, Shape(cache_dtype=stored, block_size=16), STEPS["mixed"])

    @RANDOM
    @given(shape=SHAPES, batch=st.lists(st.one_of(QUERIES, TREES), min_size=1, max_size=5), data=st.data())
    def test_drafts_that_branch(self, bench: Bench, shape: Shape, batch: list[Query], data: st.DataObject) -> None:
        """Each draft sees what it would see if its path alone had been drafted."""
        layers: list[dict[str, Any]] = [{}, {"alibi": True, "softcap": 0.0}, {"sinks": True}, {"chunked": True}]
        layer = data.draw(st.sampled_from(layers))
        self.check(bench, replace(shape, tree=True, **layer), batch)

    @pytest.mark.parametrize("window", [None, 1, 3, 40])
    @pytest.mark.parametrize("name", list(BRANCHES))
    def test_each_kind_of_tree(self, bench: Bench, name: str, window: int | None) -> None:
        """Small and large ones, alone and beside others."""
        self.check(bench, Shape(tree=True, window=window), BRANCHES[name])

    def test_large_scores_do_not_overflow(self, bench: Bench) -> None:
        """Scores far beyond what exp can take."""
        self.check(bench, Shape(block_size=16), STEPS["mixed"], factor=300.0)

    @pytest.mark.parametrize("stored", ["", "float8_e4m3fn", "int8"])
    @settings(RANDOM, max_examples=12)
    @given(batch=st.lists(QUERIES, min_size=1, max_size=3), data=st.data())
    def test_a_write_touches_its_slots_and_nothing_else(
        self, bench: Bench, stored: str, batch: list[Query], data: st.DataObject
    ) -> None:
        """Each token changes elements of its own, in its own page; a negative slot changes nothing."""
        shape = fit(bench, Shape(cache_dtype=stored, block_size=data.draw(st.sampled_from([4, 16]))))
        if shape is None:
            return
        case = make_case(bench.plugin, shape, [Query(min(q.new, 6), q.old) for q in batch], device=bench.device)
        hidden = data.draw(st.sets(st.integers(0, case.step.num_tokens - 1)))
        slots = case.step.slots.clone()
        slots[sorted(hidden)] = data.draw(st.sampled_from([-1, -5, -shape.block_size - 1]))
        together = written(bench.plugin, case, slots)
        alone = {name: np.zeros_like(changed) for name, changed in together.items()}
        for token in (token for token in range(case.step.num_tokens) if token not in hidden):
            only = torch.full_like(slots, -1)
            only[token] = slots[token]
            for name, changed in written(bench.plugin, case, only).items():
                page = int(slots[token]) // shape.block_size
                assert set(np.nonzero(changed)[0]) <= {page}, f"plane {name}: a write outside page {page}"
                assert changed.sum() * shape.block_size == changed[page].size, f"plane {name}: not a token's share"
                assert not (alone[name] & changed).any(), f"plane {name}: two tokens in one place"
                alone[name] |= changed
        for name, changed in together.items():
            assert np.array_equal(changed, alone[name]), f"plane {name}: tokens written together go elsewhere"

    @pytest.mark.parametrize("kv_heads", [2, 4, 1])
    @pytest.mark.parametrize("name", ["plain", "alibi", "sinks"])
    def test_ranks_compute_their_heads(self, bench: Bench, kv_heads: int, name: str) -> None:
        """Two ranks side by side give what one rank gives; with one cache head both hold it."""
        shape = Shape(
            kv_heads=kv_heads, ratio=4 // kv_heads, alibi=name == "alibi", sinks=name == "sinks", block_size=16
        )
        ranks = [RankInfo(rank, 2) for rank in range(2)]
        if not all(bench.accepts(shape.request(rank), layout_reasons(shape.block_size)) for rank in ranks):
            return
        case = make_case(bench.plugin, shape, STEPS["prefill"], device=bench.device)
        self.compare(case, torch.cat([run_rank(bench.plugin, case, rank) for rank in ranks], dim=1))

    def test_the_same_step_twice_gives_the_same_bits(self, bench: Bench) -> None:
        """Nothing is left behind that changes a later step."""
        shape = fit(bench, Shape(block_size=16))
        if shape is None:
            return
        case = make_case(bench.plugin, shape, STEPS["mixed"], device=bench.device)
        found = [run(bench.plugin, with_cache(case, copy_cache(case.cache))) for _ in range(2)]
        assert torch.equal(*found)

    @pytest.mark.parametrize("window", [None, 1, 4, 40])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_encoder_sequences_see_themselves_alone(self, bench: Bench, kv_heads: int, window: int | None) -> None:
        """Bidirectional attention inside each sequence."""
        needs = ENCODER.needs | ({"gqa"} if kv_heads < ENCODER.num_heads else set())
        request = replace(ENCODER, num_kv_heads=kv_heads, window=window, needs=needs)
        if bench.accepts(request):
            found, wanted = encoder_attention(bench.plugin, request, (5, 1, 17, 5, 1, 9), bench.device)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("request_", [LATENT, INDEXED], ids=lambda request: request.kind)
    @pytest.mark.parametrize("kind", list(STEPS))
    def test_latent_attention(self, bench: Bench, kind: str, request_: AttentionRequest) -> None:
        """Absorbed or expanded, over all tokens or chosen ones, the numbers are those of the definition."""
        if bench.accepts(request_, layout_reasons(4)):
            found, wanted = latent_attention(bench.plugin, request_, STEPS[kind], bench.device)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", list(BRANCHES))
    def test_latent_attention_of_drafts_that_branch(self, bench: Bench, name: str) -> None:
        """Absorbed or expanded."""
        branching = replace(LATENT, needs=LATENT.needs | {"tree"})
        if bench.accepts(branching, layout_reasons(4)):
            found, wanted = latent_attention(bench.plugin, branching, BRANCHES[name], bench.device)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("in_place", [False, True], ids=["other page", "same page"])
    @pytest.mark.parametrize("cuts", list(CUTS))
    @pytest.mark.parametrize("kind", list(STATE_SHAPES))
    def test_states_hand_on_what_was_seen(self, bench: Bench, kind: str, cuts: str, in_place: bool) -> None:
        """Whole or in pieces, beside others or alone, the outputs are those of the recurrence."""
        if not bench.accepts(state_request(kind)):
            return
        inputs = make_inputs(kind, LENGTHS, seed=3)
        found = run_states(bench.plugin, kind, inputs, CUTS[cuts], bench.device, in_place=in_place)
        for mine, tokens in zip(found, inputs.sequences, strict=True):
            torch.testing.assert_close(mine, definition(kind, tokens, inputs.constants), rtol=2e-4, atol=2e-4)

    @pytest.mark.parametrize("cuts", list(CUTS))
    @pytest.mark.parametrize("kind", [kind for kind, shape in STATE_SHAPES.items() if shape.channels])
    def test_short_convolutions(self, bench: Bench, kind: str, cuts: str) -> None:
        """``convolve`` goes on from the last tokens of the piece before."""
        if not bench.accepts(state_request(kind)):
            return
        shape = STATE_SHAPES[kind]
        inputs = make_inputs("short_conv", LENGTHS, seed=5)
        wide = _widened(inputs, shape.channels, shape.width)
        found = run_convolution(bench.plugin, kind, wide, CUTS[cuts], bench.device)
        for mine, tokens in zip(found, wide.sequences, strict=True):
            wanted = convolution(tokens["x"], wide.constants["weight"], wide.constants["bias"])
            torch.testing.assert_close(mine, torch.nn.functional.silu(wanted), rtol=1e-4, atol=1e-5)

    def test_it_behaves_as_it_declares(self, bench: Bench) -> None:
        """Its builders need the lengths that the class says; exact ones exclude recorded steps."""
        plugin: Any = bench.plugin
        assert issubclass(plugin, AttentionBackend)
        assert plugin.host_lengths is not HostLengths.EXACT or plugin.graph_support is GraphSupport.NONE
        for name, request in attention_samples().items():
            if bench.accepts(request, layout_reasons(16)) and (spec := spec_for(plugin, request, 16)) is not None:
                env = AttentionEnv(request, spec, 16, bench.device, settings_of(plugin))
                assert plugin.metadata_builder(env).host_lengths is plugin.host_lengths, name


def fit(bench: Bench, shape: Shape) -> Shape | None:
    """Return a shape that the backend accepts: this one, or one like it of larger heads and blocks, or of a narrower
    type, as kernels for matrix units want them. None where it accepts none; each refusal has its reasons.
    """
    wide = replace(shape, head_size=64, value_size=64 if shape.value_size == shape.head_size else 128, block_size=16)
    wider = replace(wide, head_size=128, value_size=128)
    types = [replace(other, dtype=dtype) for dtype in ("bfloat16", "float16") for other in (shape, wide, wider)]
    narrow = types if shape.dtype == "float32" else []
    fitting = (s for s in (shape, wide, wider, *narrow) if bench.accepts(s.request(), layout_reasons(s.block_size)))
    return next(fitting, None)


def _widened(inputs: Inputs, channels: int, width: int) -> Inputs:
    generator = torch.Generator().manual_seed(7)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    sequences = [{"x": draw(len(tokens["x"]), channels)} for tokens in inputs.sequences]
    return Inputs(sequences, {"weight": draw(channels, width), "bias": draw(channels)}, (channels,))
