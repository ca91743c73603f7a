"""Hook plugins hear what the prefix cache holds, when the setting is on."""

from __future__ import annotations

from typing import Any

import pytest
from engine_world import drain, greedy, ids_of, prompt, start

from jackfield import LLM
from jackfield.errors import ConfigError
from jackfield.interfaces import BlocksRemoved, BlocksStored, CacheCleared, hookimpl


class Router:
    """Knows which prefixes the engine holds."""

    def __init__(self) -> None:
        self.known: set[tuple[int, bytes]] = set()
        self.calls = 0

    @hookimpl
    def kv_events(self, events: Any) -> None:
        self.calls += 1
        assert events, "an empty list is no news"
        for event in events:
            if isinstance(event, BlocksStored):
                self.known |= {(event.group, name) for name in event.hashes}
            elif isinstance(event, BlocksRemoved):
                self.known -= {(event.group, name) for name in event.hashes}
            else:
                assert isinstance(event, CacheCleared)
                self.known.clear()


def heard(llm: LLM) -> Router:
    router = Router()
    llm._hooks.add(router, "router")
    return router


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"num_blocks": 40}])
def test_a_listener_knows_what_the_cache_holds(model: str, settings: dict[str, Any]) -> None:
    llm = start(model, kv_events=True, **settings)
    router = heard(llm)
    for seed in range(3):
        ids_of(llm, [prompt(seed, 20), prompt(seed + 1, 33), prompt(9, 41)], greedy(12))
        drain(llm)
        assert router.known == set(llm._core.scheduler.cache.pool._block_of)
        assert router.known
    assert llm.reset_prefix_cache()
    assert router.known == set()


def test_it_is_off_by_default(model: str) -> None:
    llm = start(model)
    router = heard(llm)
    ids_of(llm, [prompt(1, 20)], greedy(12))
    assert router.calls == 0
    assert llm._core.scheduler.cache.pool._block_of


def test_events_of_a_cache_without_prefixes_are_refused(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start(model, kv_events=True, enable_prefix_caching=False)
    assert caught.value.message == "cache.kv_events does nothing without prefix caching (api: kv_events)"
    assert caught.value.field == "cache.kv_events"
