"""Recording of work in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def record(graphs: Any, work: Callable[[], Any], pool: Any = None) -> Any:
    """Record ``work`` on a stream of its own, and return the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = graphs.begin(pool or graphs.new_pool())
        work()
        graphs.end(graph)
    torch.cuda.current_stream().wait_stream(stream)
    return graph
