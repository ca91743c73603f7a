from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from jackfield.config import EngineConfig, Origin, Selection, load_config
from jackfield.config.engine import DIGEST_IGNORES
from jackfield.errors import ConfigError, PluginError
from jackfield.interfaces import ConfigView, Proposal


def load(**api: Any) -> EngineConfig:
    return load_config(env={}, api=api)


def must(value: Any, field: str = "cache.block_size", reason: str = "pages of 16") -> Proposal:
    return Proposal(field, value, must=True, reason=reason)


def should(value: Any, field: str = "cache.block_size", reason: str = "fast with 32") -> Proposal:
    return Proposal(field, value, must=False, reason=reason)


def test_a_configuration_is_a_config_view_and_frozen() -> None:
    view: ConfigView = load(seed=1)
    assert view.get("model.seed") == 1
    with pytest.raises(ValidationError, match="frozen"):
        view.model = None  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["cache.blok", "absent", "attention.kinds.sliding.force"])
def test_get_raises_key_error(name: str) -> None:
    with pytest.raises(KeyError):
        load().get(name)


def test_proposals_fill_defaults() -> None:
    before = load()
    config, applied = before.with_proposals([should(32)])
    assert (before.cache.block_size, config.cache.block_size) == (None, 32)
    assert [(entry.status, entry.value) for entry in applied] == [("applied", 32)]
    assert str(config.origin("cache.block_size")) == "proposal: fast with 32"
    assert not config.is_user_set("cache.block_size")


def test_a_users_value_is_never_changed() -> None:
    before = load(block_size=8)
    config, applied = before.with_proposals([should(32), must(8)])
    assert config == before
    assert [entry.status for entry in applied] == ["refused", "agrees"]
    assert applied[0].origin == Origin("api", "block_size")


def test_a_binding_proposal_against_a_users_value_names_both() -> None:
    with pytest.raises(ConfigError) as caught:
        load(block_size=8).with_proposals([must(16)])
    assert caught.value.message == "cache.block_size is 8 (api: block_size), but must be 16: pages of 16"
    assert caught.value.remedy == "set cache.block_size to 16 or leave it out"
    assert (caught.value.field, caught.value.value) == ("cache.block_size", 8)


def test_binding_proposals_come_first_and_must_agree() -> None:
    config, applied = load().with_proposals([should(32), must(16), must(16)])
    assert config.cache.block_size == 16
    assert [entry.status for entry in applied] == ["refused", "applied", "agrees"]
    with pytest.raises(ConfigError, match=r"cache.block_size is 16 \(proposal: a\), but must be 64: b"):
        load().with_proposals([must(16, reason="a"), must(64, reason="b")])


def test_a_later_binding_proposal_replaces_an_earlier_suggestion() -> None:
    config, _ = load().with_proposals([should(32)])
    config, applied = config.with_proposals([must(16)])
    assert (config.cache.block_size, applied[0].status) == (16, "applied")


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (must(1, field="cache.blok_size"), "names 'cache.blok_size', which is no setting"),
        (must(1, field="cache"), "names 'cache', which is no setting"),
        (must("many"), "has a wrong value: cache.block_size cannot be 'many'"),
    ],
)
def test_bad_proposals_are_the_plugins_fault(proposal: Proposal, message: str) -> None:
    with pytest.raises(PluginError) as caught:
        load().with_proposals([proposal])
    assert message in caught.value.message


def test_derived_values() -> None:
    config = load(block_size=8).with_derived({"cache.num_blocks": 100, "cache.block_size": 8}, "fits the memory")
    assert (config.cache.num_blocks, str(config.origin("cache.num_blocks"))) == (100, "derived: fits the memory")
    assert config.origin("cache.block_size").by_user
    with pytest.raises(ConfigError, match=r"cache.block_size is 8 \(api: block_size\), but works out as 16: pages"):
        config.with_derived({"cache.block_size": 16}, "pages")
    with pytest.raises(KeyError):
        config.with_derived({"cache.blok": 16}, "pages")


def test_selections_by_family() -> None:
    config = load(attention="a", platform="p", quantization="q", moe="m", ops="o", speculative={"method": "ngram"})
    families = ("platforms", "quantization_methods", "moe_experts", "attention_backends", "ops", "drafters", "models")
    assert [config.selection(family).force for family in families] == ["p", "q", "m", "a", "o", "ngram", None]
    assert load().drafter == Selection()


def test_the_digest_counts_values_and_not_origins() -> None:
    assert load(seed=1).digest() == load_config(env={}, cli={"seed": "1"}).digest()
    assert load(seed=1).digest() != load(seed=2).digest()
    assert len(load().digest()) == 64


_CHANGES: dict[str, Any] = {
    "model.model": "m",
    "model.tokenizer": "t",
    "model.dtype": "float32",
    "model.max_model_len": 1,
    "model.seed": 1,
    "model.load_format": "dummy",
    "model.hf_overrides": {"a": 1},
    "model.allow_unused_config_keys": ["a"],
    "platform.force": "a",
    "attention.layers.3.exclude": ["a"],
    "quantization.force": "a",
    "moe.force": "a",
    "ops.kinds.rotary.prefer": ["a"],
    "cache.block_size": 1,
    "cache.num_blocks": 1,
    "cache.cache_dtype": "a",
    "cache.kv_cache_memory": 1,
    "cache.gpu_memory_utilization": 0.1,
    "cache.enable_prefix_caching": False,
    "cache.kv_events": True,
    "scheduler.max_num_seqs": 1,
    "scheduler.max_num_batched_tokens": 300,
    "scheduler.enable_chunked_prefill": False,
    "scheduler.long_prefill_token_threshold": 1,
    "scheduler.policy": "priority",
    "scheduler.max_waiting": 1,
    "scheduler.async_scheduling": False,
    "speculative.method": "a",
    "sampling.logits_processors": ["a"],
    "generation": {"top_k": 1},
    "plugins.options.a.b": 1,
    "plugins.disable": ["a"],
}


@pytest.mark.parametrize("field", sorted(_CHANGES))
def test_the_digest_sees_every_setting(field: str) -> None:
    assert load(**{field: _CHANGES[field]}).digest() != load().digest()


@pytest.mark.parametrize("change", [{"log.level": "debug"}, {"model.download_dir": "x"}, {"server.port": 1}])
def test_the_digest_ignores_what_changes_no_output(change: dict[str, Any]) -> None:
    assert load(**change).digest() == load().digest()
    assert DIGEST_IGNORES == ("log", "server", "model.download_dir")


def test_origins_survive_pickling() -> None:
    config = load(seed=1, attention={"kinds": {"full": "a"}})
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.origins == config.origins != {}


def test_to_dict_is_plain_and_reloads() -> None:
    config = load(attention={"prefer": ["a"]}, kv_cache_memory="1KiB", hf_overrides={"a": [1]})
    data = config.to_dict()
    assert (data["attention"]["prefer"], data["cache"]["kv_cache_memory"]) == (["a"], 1024)
    assert load(**data).to_dict() == data
