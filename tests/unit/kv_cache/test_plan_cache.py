from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.errors import ConfigError
from jackfield.interfaces import BLOCK, CacheSpec, Plane
from jackfield.kv_cache import CacheGroup, Retention, plan_cache, split_layers

SPEC = CacheSpec((Plane("k", "float32", (2, BLOCK, 8)), Plane("v", "float32", (2, BLOCK, 8))))
ONE = CacheGroup("full", (0, 1, 2), (SPEC,) * 3)
SMALL = CacheGroup("sliding", (3,), (SPEC,), 9)
PAGE = 3 * 2 * (2 * 16 * 8) * 4
"""Bytes of a block of 16 tokens over three layers: keys and values, two heads of eight floats."""


def test_a_budget_buys_blocks() -> None:
    plan = plan_cache([ONE], 16, budget_bytes=10 * PAGE, max_model_len=100, max_num_seqs=64)
    assert plan.page_bytes == PAGE
    assert plan.num_blocks == 10
    assert plan.total_bytes == 10 * PAGE
    assert plan.num_tokens == 9 * 16, "one block is nobody's"
    assert plan.max_model_len == 100


@given(
    budget=st.integers(0, 200 * PAGE),
    length=st.integers(1, 300),
    sequences=st.integers(1, 8),
    groups=st.sampled_from([(ONE,), (ONE, SMALL)]),
)
def test_a_plan_never_exceeds_its_budget_and_holds_a_sequence(
    budget: int, length: int, sequences: int, groups: tuple[CacheGroup, ...]
) -> None:
    per_sequence = -(-length // 16) * len(groups)
    enough = budget // PAGE >= per_sequence + 1
    if not enough:
        with pytest.raises(ConfigError):
            plan_cache(groups, 16, budget_bytes=budget, max_model_len=length, max_num_seqs=sequences)
        return
    plan = plan_cache(groups, 16, budget_bytes=budget, max_model_len=length, max_num_seqs=sequences)
    assert plan.total_bytes <= budget
    assert plan.num_blocks == min(budget // PAGE, per_sequence * sequences + 1)
    assert plan.num_tokens >= length == plan.max_model_len


def test_no_more_than_all_sequences_could_fill() -> None:
    plan = plan_cache([ONE], 16, budget_bytes=1 << 40, max_model_len=100, max_num_seqs=3)
    assert plan.num_blocks == 3 * 7 + 1


def test_groups_share_blocks_of_the_largest_size() -> None:
    plan = plan_cache([ONE, SMALL], 16, budget_bytes=1 << 40, max_model_len=100, max_num_seqs=1)
    assert plan.page_bytes == PAGE
    assert plan.num_blocks == 2 * 7 + 1
    assert plan.num_tokens == 100, "one sequence of the maximum length"


def test_a_number_of_blocks_goes_before_a_budget() -> None:
    plan = plan_cache([ONE], 16, budget_bytes=0, max_model_len=30, max_num_seqs=9, num_blocks=5)
    assert (plan.num_blocks, plan.num_tokens) == (5, 64)


def test_too_little_memory_says_what_would_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_cache([ONE], 16, budget_bytes=4 * PAGE, max_model_len=100, max_num_seqs=1)
    error = caught.value
    assert error.message == "the KV cache holds 48 tokens, less than one sequence of max_model_len = 100"
    assert (error.field, error.value) == ("model.max_model_len", 100)
    assert error.remedy == ("lower max_model_len to 48 or less, or give the cache more memory (cache.kv_cache_memory)")


def test_a_length_that_nobody_set_is_lowered_to_what_fits() -> None:
    plan = plan_cache([ONE], 16, budget_bytes=4 * PAGE, max_model_len=100, max_num_seqs=1, fit_length=True)
    assert plan.max_model_len == 48
    with pytest.raises(ConfigError) as caught:
        plan_cache([ONE], 16, budget_bytes=PAGE, max_model_len=100, max_num_seqs=1, fit_length=True)
    assert caught.value.remedy == "give the cache more memory (cache.kv_cache_memory)"


def test_models_that_keep_nothing_need_no_memory() -> None:
    plan = plan_cache([], 16, budget_bytes=0, max_model_len=100, max_num_seqs=4)
    assert (plan.page_bytes, plan.total_bytes, plan.max_model_len) == (0, 0, 100)


STATE = CacheSpec((Plane("ssm", "float32", (24, 16)), Plane("conv", "float32", (24, 3))), per="sequence")


def test_a_window_needs_no_blocks_for_what_it_does_not_keep() -> None:
    window = CacheGroup("sliding", (0,), (SPEC,), 33)
    plan = plan_cache([window], 16, budget_bytes=1 << 40, max_model_len=10_000, max_num_seqs=2, step_tokens=64)
    # 32 tokens before the step and 64 in it, which may begin anywhere in a block.
    assert plan.num_blocks == 2 * 7 + 1
    assert plan.num_tokens == 2 * 10_000


def test_a_recurrent_state_takes_the_same_room_at_any_length() -> None:
    state = CacheGroup("mamba", (0, 1), (STATE, STATE), retention=Retention.STATE)
    plan = plan_cache([state], 256, budget_bytes=1 << 40, max_model_len=1 << 20, max_num_seqs=5)
    assert plan.page_bytes == 2 * (24 * 16 * 4 + 24 * 3 * 4)
    assert plan.num_blocks == 5 * 3 + 1


def test_layers_of_very_different_numbers_are_cut_into_groups_of_like_size() -> None:
    assert split_layers({"a": range(4), "b": range(4, 9)}) == {"a": [(0, 1, 2, 3)], "b": [(4, 5, 6, 7, 8)]}
    parts = split_layers({"full": [5, 11, 17], "sliding": [i for i in range(18) if i % 6 != 5]})
    assert parts["full"] == [(5, 11, 17)]
    assert parts["sliding"] == [(0, 1, 2), (3, 4, 6), (7, 8, 9), (10, 12, 13), (14, 15, 16)]
    most = split_layers({"full": [40], "mamba": range(40)})
    assert len(most["mamba"]) == 8 and all(len(part) == 5 for part in most["mamba"])
    assert split_layers({}) == {}
