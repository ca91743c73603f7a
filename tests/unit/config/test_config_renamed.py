from __future__ import annotations

from typing import Any

import pytest

from jackfield.config import load_config
from jackfield.config.renamed import table
from jackfield.config.schema import flat_names, parse
from jackfield.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("kv_cache_dtype", "float16", "cache.cache_dtype", "float16"),
        ("attention_backend", "flashinfer", "attention.force", "flashinfer"),
        ("num_gpu_blocks_override", 7, "cache.num_blocks", 7),
        ("kv_cache_memory_bytes", 7, "cache.kv_cache_memory", 7),
        ("scheduling_policy", "priority", "scheduler.policy", "priority"),
        ("max_num_queued_reqs", 7, "scheduler.max_waiting", 7),
        ("override_generation_config", {"top_k": 3}, "generation", {"top_k": 3}),
        ("speculative_config", {"method": "ngram"}, "speculative.method", "ngram"),
        ("max_seq_len", 7, "model.max_model_len", 7),
    ],
)
def test_same_meaning_is_accepted(name: str, value: Any, field: str, expected: Any) -> None:
    config = load_config(env={}, api={name: value})
    assert config.get(field) == expected
    assert config.origin(field).where == name


def test_the_accepted_names_are_all_tested() -> None:
    marks = test_same_meaning_is_accepted.pytestmark
    tested = {case[0] for case in marks[0].args[1]}
    assert tested == {name for name, row in table().items() if row.same}


@pytest.mark.parametrize("name", sorted(name for name, row in table().items() if not row.same))
def test_other_names_are_errors_that_name_the_replacement(name: str) -> None:
    row = table()[name]
    source: dict[str, Any] = {"env": {name: "1"}} if name.isupper() else {"env": {}, "api": {name: 1}}
    with pytest.raises(ConfigError) as caught:
        load_config(**source)
    assert caught.value.message.startswith(f"'{name}' is a setting of another engine and not one of this")
    assert (row.to or row.note) in caught.value.remedy
    assert row.note in caught.value.remedy


def test_replacements_exist_and_no_own_name_is_in_the_table() -> None:
    for row in table().values():
        assert row.to or row.note, row.name
        assert not row.to or isinstance(parse(row.to), tuple), row.name
    assert not set(table()) & set(flat_names())


def test_a_name_of_another_engine_inside_a_section() -> None:
    assert load_config(env={}, api={"cache": {"kv_cache_dtype": "float16"}}).cache.cache_dtype == "float16"
    with pytest.raises(ConfigError, match="'swap_space' is a setting of another engine"):
        load_config(env={}, api={"cache": {"swap_space": 4}})
