"""Jackfield: an engine that runs and serves large language models, in which every part that differs is a plugin.

The names below are imported on first use, so that ``import jackfield`` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jackfield.engine.async_llm import AsyncLLM
    from jackfield.engine.llm import LLM
    from jackfield.engine.outputs import CompletionOutput, PoolingOutput, RequestOutput
    from jackfield.protocol import PoolingParams, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "PoolingOutput",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "jackfield.engine.llm",
    "AsyncLLM": "jackfield.engine.async_llm",
    "RequestOutput": "jackfield.engine.outputs",
    "CompletionOutput": "jackfield.engine.outputs",
    "PoolingOutput": "jackfield.engine.outputs",
    "PoolingParams": "jackfield.protocol",
    "SamplingParams": "jackfield.protocol",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'jackfield' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)
