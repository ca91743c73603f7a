"""Conformance of scheduling policies: a key for every request, always the same, and nobody's tokens change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.interfaces import RequestView, SchedulingPolicy
from jackfield.protocol import SamplingParams
from jackfield.testing.attention import RANDOM
from jackfield.testing.bench import Bench
from jackfield.testing.common import PluginConformance
from jackfield.testing.tiny import assert_greedy, engine, make_tiny, random_prompts

VIEWS = st.builds(
    RequestView,
    request_id=st.text(min_size=1, max_size=8),
    arrival=st.integers(0, 10**9),
    priority=st.integers(-(10**6), 10**6),
    prompt_length=st.integers(1, 10**6),
    max_tokens=st.integers(1, 10**6),
    adapter=st.sampled_from(["", "a"]),
    extra_args=st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


class SchedulingConformance(PluginConformance):
    """Keys are tuples of numbers; an engine under the policy serves everybody, with the reference's tokens."""

    family: ClassVar[str] = "scheduling_policies"

    @pytest.fixture
    def policy(self, plugin: type[SchedulingPolicy], bench: Bench) -> SchedulingPolicy:
        """The policy of one engine."""
        return plugin.build(bench.settings())

    @RANDOM
    @given(views=st.lists(VIEWS, min_size=2, max_size=6))
    def test_keys_are_numbers_and_depend_on_the_request_alone(
        self, policy: SchedulingPolicy, views: list[RequestView]
    ) -> None:
        """Asked in any order, a request has the same key; all keys can be compared with one another."""
        keys: list[Any] = [policy.key(view) for view in views]
        assert [policy.key(view) for view in reversed(views)] == keys[::-1]
        for key in keys:
            assert isinstance(key, tuple) and key, f"{key!r} is no tuple of numbers"
            assert all(isinstance(part, int | float) and not math.isnan(part) for part in key), f"{key!r}"
        assert len({len(key) for key in keys}) == 1, "keys of different lengths"
        sorted(keys)

    def test_every_request_is_served_and_tokens_stay(self, plugin: type[SchedulingPolicy], tmp_path: Path) -> None:
        """Twelve requests through two places give the reference's tokens."""
        tiny, prompts = make_tiny(tmp_path / "model"), random_prompts((40, 3, 77, 9, 1, 60, 20, 5, 33, 2, 90, 12))
        greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        plugins = [] if self.installed else [plugin]
        with engine(tiny.folder, plugins, max_num_seqs=2, policy=plugin.name) as llm:
            chosen = [d.name for d in llm.report.decisions if d.family == "scheduling_policies"]
            outputs = llm.generate(prompts, greedy, priority=[n % 4 for n in range(len(prompts))])
        assert chosen == [plugin.name]
        assert_greedy(tiny.model, prompts, [request.outputs[0].token_ids for request in outputs])
