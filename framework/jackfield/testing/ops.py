"""Conformance of op providers: each op against its torch reference, and draws against their distribution.

Legend: T tokens, E width, F intermediate, H heads, D head size, R rotary size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from jackfield.interfaces import OPS, QUANTIZING_OPS, STEP_OPS, DrawBatch, MoEConfig, OpRequest, QuantizedActivation
from jackfield.layers.functional import REFERENCES
from jackfield.layers.routing import SCORES
from jackfield.protocol import NewSequence, SamplingParams
from jackfield.sampling import SamplingState
from jackfield.testing.bench import Bench
from jackfield.testing.common import PluginConformance
from jackfield.testing.statistics import Floats, assert_distributed
from jackfield.testing.step_cases import Tables, check_greedy, check_inputs, check_rounds, check_single

LOGITS = (1.2, 0.3, -0.4, 2.0, 0.3, -3.0, 1.1)
DRAWS = 4000
FILTERS: Mapping[str, SamplingParams] = {
    "plain": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "top_p": SamplingParams(temperature=0.9, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.2),
    "all": SamplingParams(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
}


class OpsConformance(PluginConformance):
    """Every op that the provider declares, in the types that it declares."""

    family: ClassVar[str] = "ops"
    tolerances: ClassVar[Mapping[str, float]] = {"float32": 1e-5, "bfloat16": 2e-2}
    """Largest absolute and relative error by computation type."""
    narrow_tolerance: ClassVar[float] = 0.13
    """Of quantized rows, as a part of each row's largest number: one step of the type."""

    def build(self, bench: Bench, op: str, dtype: str) -> Callable[..., Any] | None:
        """Return the provider's function, or None where it refuses the op."""
        request = OpRequest(subject=op, kind=op, dtype=dtype)
        plugin: Any = bench.plugin
        return plugin.build(op, request, bench.settings()) if bench.accepts(request) else None

    @pytest.mark.parametrize("rows", [1, 7, 130])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("op", [*OPS, *QUANTIZING_OPS])
    def test_each_op_is_its_reference(self, bench: Bench, op: str, dtype: str, rows: int) -> None:
        """The results of the reference, also on rows that lie apart in memory; inputs stay as they are."""
        if (function := self.build(bench, op, dtype)) is None:
            return
        for apart in (False, True):
            given = [_placed(value, bench.device) for value in inputs(op, rows, dtype, apart=apart)]
            kept = [value.clone() if isinstance(value, torch.Tensor) else value for value in given]
            wanted = REFERENCES[op](*(value.clone() if isinstance(value, torch.Tensor) else value for value in given))
            self.compare(function(*given), wanted, dtype)
            if op != "rotary":  # which is in place
                assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True) if isinstance(a, torch.Tensor))

    def compare(self, found: Any, wanted: Any, dtype: str) -> None:
        """Compare what an op returned with the reference's."""
        if isinstance(wanted, tuple):
            for one, other in zip(found, wanted, strict=True):
                self.compare(one, other, dtype)
        elif isinstance(wanted, QuantizedActivation):
            assert found.values.dtype == wanted.values.dtype and found.scales.shape == wanted.scales.shape
            mine, theirs = (x.values.float() * x.scales.unsqueeze(-1) for x in (found, wanted))
            bound = self.narrow_tolerance * theirs.abs().amax(-1, keepdim=True)
            assert bool(((mine - theirs).abs() <= bound).all())
        else:
            assert found.dtype == wanted.dtype
            bound = self.tolerances[dtype]
            torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)

    @pytest.mark.parametrize("scoring", list(SCORES))
    def test_experts_are_chosen_as_the_reference_chooses(self, bench: Bench, scoring: str) -> None:
        """Scores, groups, biases that choose and do not weigh, ties to the lower index."""
        if (choose := self.build(bench, "route_experts", "float32")) is None:
            return
        plain = MoEConfig(num_experts=12, top_k=3, hidden_size=8, intermediate_size=8, scoring=scoring)
        grouped = replace(plain, num_groups=4, top_groups=2, group_score="top2", scale=2.5, renormalize=False)
        generator = torch.Generator().manual_seed(2)
        logits, bias = torch.randn(9, 12, generator=generator) * 2, torch.randn(12, generator=generator)
        logits[:2] = torch.tensor([0.0, 1.0, 1.0]).repeat(4)
        for config, added in ((plain, None), (plain, bias), (grouped, None), (grouped, bias)):
            placed = None if added is None else added.to(bench.device)
            weights, experts = choose(logits.to(bench.device), config, placed)
            wanted, names = REFERENCES["route_experts"](logits, config, added)
            assert experts.dtype == torch.int64 and torch.equal(experts.cpu(), names)
            torch.testing.assert_close(weights.cpu(), wanted, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("sequences", [1, 13])
    @pytest.mark.parametrize("width", [1, 4])
    def test_what_surrounds_the_model_is_its_reference(self, bench: Bench, width: int, sequences: int) -> None:
        """Ops of recorded steps, to the last bit: what they return, and what they leave in the tables."""
        built = {op: self.build(bench, op, "float32") for op in STEP_OPS}
        ops = {op: function or REFERENCES[op] for op, function in built.items()}
        tables = Tables.make(sequences, str(bench.device), seed=width)
        for cut in (False, True):
            check_inputs(ops["token_inputs"], tables, width, cut=cut)
        check_rounds(ops["begin_round"], ops["keep_tokens"], ops["end_round"], tables, width)
        check_single(ops["keep_tokens"], tables)
        check_greedy(ops["greedy_tokens"], sequences, 700, torch.float32, str(bench.device))

    @pytest.mark.parametrize("name", list(FILTERS))
    def test_draws_follow_their_distribution(self, bench: Bench, name: str) -> None:
        """Temperature, min_p, top_k and top_p, in that order, then a draw; nothing that is filtered out comes."""
        if (draw := self.build(bench, "draw_tokens", "float32")) is None:
            return
        batch = draw_batch([FILTERS[name]], [0] * DRAWS, bench.device)
        logits = torch.tensor(LOGITS, device=bench.device).repeat(DRAWS, 1)
        ids = draw(logits, batch)
        assert ids.dtype == torch.int64 and ids.shape == (DRAWS,)
        counts = np.bincount(ids.cpu().numpy(), minlength=len(LOGITS)).astype(np.float64)
        assert_distributed(counts, distribution(LOGITS, FILTERS[name]))

    def test_greedy_rows_take_the_largest_and_mates_change_nothing(self, bench: Bench) -> None:
        """A row's token depends on its own logits, parameters, seed and position alone."""
        if (draw := self.build(bench, "draw_tokens", "float32")) is None:
            return
        params = [SamplingParams(temperature=0.0), *FILTERS.values()]
        slots = [index % len(params) for index in range(60)]
        logits = torch.randn(60, 50, generator=torch.Generator().manual_seed(5)).to(bench.device)
        batch = draw_batch(params, slots, bench.device)
        together = draw(logits.clone(), batch)
        for row, slot in enumerate(slots):
            if slot == 0:
                assert int(together[row]) == int(logits[row].argmax())
            alone = draw(logits[row : row + 1].clone(), draw_batch(params, [slot], bench.device, first=row))
            assert int(alone[0]) == int(together[row])


def inputs(op: str, rows: int, dtype: str, *, apart: bool) -> tuple[Any, ...]:
    """Return random inputs of an op; ``apart``: rows lie apart in memory."""
    generator, kind = torch.Generator().manual_seed(rows), getattr(torch, dtype)

    def draw(*shape: int) -> torch.Tensor:
        wide = torch.randn(*shape[:-1], shape[-1] + (16 if apart else 0), generator=generator).to(kind)
        return wide[..., : shape[-1]]

    name = op.removesuffix("_quant")
    if name in ("rms_norm", "fused_add_rms_norm"):
        weight = torch.randn(64, generator=generator).to(kind)
        return (*(draw(rows, 64) for _ in range(2 if name.startswith("fused") else 1)), weight, 1e-5)
    if name == "rotary":
        angles = torch.randn(rows, 8, generator=generator)
        return draw(rows, 6, 20), torch.cat((angles.cos(), angles.sin()), -1)
    return (draw(rows, 96),)


def _placed(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def draw_batch(
    params: Sequence[SamplingParams], slots: Sequence[int], device: torch.device, *, first: int = 0
) -> DrawBatch:
    """Return a batch of one row for each of ``slots``, at positions that count up; slot i has ``params[i]``."""
    state, prompt = SamplingState(len(params), device), np.zeros(1, dtype=np.int32)
    state.fill([NewSequence(i, str(i), prompt, 1, one, (), seed=i) for i, one in enumerate(params)])
    host = np.array(slots, dtype=np.int32)
    positions = np.arange(first, first + len(host), dtype=np.int32)
    return state.batch(host, torch.from_numpy(host.astype(np.int64)).to(device), positions)


def distribution(logits: Sequence[float], params: SamplingParams) -> Floats:
    """Return the probabilities that the parameters describe, token by token in float64."""
    values = np.asarray(logits, dtype=np.float64)
    weights = np.exp((values - values.max()) / params.temperature)
    weights[weights < params.min_p] = 0.0
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.top_k:
        weights[order[params.top_k :]] = 0.0
    before, limit = 0.0, params.top_p * weights.sum()
    for token in order:
        share = weights[token]
        if before >= limit:
            weights[token] = 0.0
        before += share
    return np.asarray(weights / weights.sum())
