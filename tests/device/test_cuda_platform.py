"""The CUDA platform on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from recording import record

from jackfield.interfaces import ConfigView
from jackfield_platforms.cuda import CudaPlatform

pytestmark = pytest.mark.gpu


class NoConfig:
    """A configuration of nothing."""

    def get(self, field: str) -> object:
        raise KeyError(field)

    def is_user_set(self, field: str) -> bool:
        return False

    def plugin_options(self, name: str) -> dict[str, object]:
        return {}


@pytest.fixture
def platform() -> CudaPlatform:
    config: ConfigView = NoConfig()
    return CudaPlatform.bind(0, config)


def test_facts_agree_with_torch() -> None:
    assert CudaPlatform.probe().present
    facts, seen = CudaPlatform.facts(0), torch.cuda.get_device_properties(0)
    assert facts.type == "cuda"
    assert facts.name == seen.name
    assert facts.capability == (seen.major, seen.minor)
    assert facts.cores == seen.multi_processor_count
    # NVML counts memory that the driver keeps for itself, torch does not.
    assert seen.total_memory <= facts.memory_bytes < seen.total_memory * 1.05


def test_memory_counts_what_is_allocated(platform: CudaPlatform) -> None:
    before = platform.memory()
    held = torch.zeros(1 << 28, dtype=torch.uint8, device=platform.device)
    during = platform.memory()
    assert before.total == during.total
    assert before.free - during.free >= held.numel()
    del held
    platform.empty_cache()
    assert platform.memory().free > during.free


def test_streams_order_work(platform: CudaPlatform) -> None:
    streams = platform.stream_api()
    first, second = streams.new_stream(), streams.new_stream()
    x = torch.zeros(1 << 24, device=platform.device)
    platform.synchronize()
    with streams.use(first):
        for _ in range(50):
            x += 1
    done = streams.record(first)
    streams.wait(second, done)
    with streams.use(second):
        y = x * 2
    last = streams.record(second)
    streams.synchronize(last)
    assert float(y[0]) == float(y[-1]) == 100


def test_graphs_replay_and_share_a_pool(platform: CudaPlatform) -> None:
    graphs = platform.graph_api()
    x, y = (torch.ones(1024, device=platform.device) for _ in range(2))

    def work() -> None:
        y.copy_(x * 3)

    work()
    platform.synchronize()
    pool = graphs.new_pool()
    recorded = [record(graphs, work, pool) for _ in range(2)]
    for value, graph in zip((2.0, 5.0), recorded, strict=True):
        x.fill_(value)
        graphs.replay(graph)
        platform.synchronize()
        assert float(y[0]) == float(y[-1]) == 3 * value
