"""Engines and tiny models, as all tests of this folder know them. Not in conftest.py: folders below have files of that
name too, and only one of them is the module ``conftest``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf import LLAMA3_ROPE, WINDOW, Tiny, make_tiny

from jackfield import LLM
from jackfield_native.toolchain import unavailable

TINY: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "llama_tied": {"kind": "llama", "tie_word_embeddings": True},
    "llama_shards": {"kind": "llama", "shard": "200KB"},
    "llama_biases": {"kind": "llama", "attention_bias": True, "mlp_bias": True},
    "llama_rope": {"kind": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama_mha": {"kind": "llama", "num_key_value_heads": 4, "head_dim": 24, "tie_word_embeddings": True},
    "mistral": {"kind": "mistral", "sliding_window": WINDOW, "head_dim": 16},
    "qwen2": {
        "kind": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "qwen3": {"kind": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}
"""Names of tiny models, and what :func:`hf.make_tiny` makes them from."""

Engine = Callable[..., LLM]

CPU_ATTENTION = "torch_sdpa" if unavailable() else "native_cpu"
CPU_OPS = "torch" if unavailable() else "native+torch"
"""What is chosen on a CPU: kernels in C, where there is a compiler."""


class Models:
    """Makes each tiny model when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Tiny] = {}

    def __getitem__(self, name: str) -> Tiny:
        if name not in self._made:
            self._made[name] = make_tiny(self._root / name, **TINY[name])
        return self._made[name]


def check_idle(llm: LLM) -> None:
    """Run what is left of aborted requests, then fail if anything is still held."""
    while llm._core.has_work():
        llm._advance()
    llm._core.scheduler.check_idle()
    assert llm._outputs.num_requests() == 0
    assert not llm._streams and not llm._done, "outputs are left that nobody waits for"
