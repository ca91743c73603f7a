"""A model without weights, a registry with exactly the plugins of a test, and stand-ins that fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fakes import FakeAttention

from jackfield.config import load_config
from jackfield.interfaces import BLOCK, BlockSizes, CacheSpec, ModelFacts, Plane, Plugin
from jackfield.oracle.pipeline import resolve
from jackfield.oracle.resolution import Resolution
from jackfield.oracle.verdict import Decision
from jackfield.registry import Registry
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_models.llama import Llama, Qwen2
from jackfield_ops.torch_ops import TorchOps
from jackfield_platforms.cpu import CpuPlatform
from jackfield_quantization.unquantized import Unquantized
from jackfield_scheduling.policies import Fcfs
from jackfield_spec_decode.ngram import NgramDrafter

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WINDOWS = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
"""Changes of CONFIG that give layers of two kinds."""
PLUGINS: tuple[type[Plugin], ...] = (
    CpuPlatform,
    Llama,
    Qwen2,
    Unquantized,
    TorchSdpaBackend,
    TorchOps,
    NgramDrafter,
    Fcfs,
)


class Fitting(FakeAttention):
    """A backend for every layer that is not windowed; tests set the class attributes."""

    name = "fitting"
    features = frozenset({"prefill", "chunked_prefill", "decode", "mixed", "gqa"})
    block_sizes = BlockSizes()
    plane = "fitted"

    @classmethod
    def cache_specs(cls, request: Any) -> Any:
        return [CacheSpec((Plane(cls.plane, request.dtype, (BLOCK, 8)),), block_sizes=cls.block_sizes)]


def fitting(name: str, **attributes: Any) -> type[Fitting]:
    """Return a subclass of :class:`Fitting` with that name and those class attributes."""
    return type(name, (Fitting,), {"name": name, **attributes})


def facts(**changes: Any) -> ModelFacts:
    """Return the facts of a folder that has a config.json and no weights."""
    config = {**CONFIG, **changes}
    return ModelFacts("model", "config", config["architectures"][0], config)


def registry_of(*plugins: type[Plugin], without: tuple[type[Plugin], ...] = ()) -> Registry:
    """Return a registry of this process with PLUGINS and ``plugins``."""
    registry = Registry()
    for plugin in (*(p for p in PLUGINS if p not in without), *plugins):
        registry.register(plugin)
    return registry


def run(
    *plugins: type[Plugin],
    without: tuple[type[Plugin], ...] = (),
    model: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Resolution:
    """Resolve with the project's CPU plugins and ``plugins``."""
    config = load_config(env={}, api={"model": "model", **settings})
    return resolve(config, facts(**(model or {})), registry_of(*plugins, without=without))


def decision_of(resolution: Resolution, family: str) -> Decision:
    """Return the only decision on a family."""
    (found,) = (decision for decision in resolution.report.decisions if decision.family == family)
    return found
