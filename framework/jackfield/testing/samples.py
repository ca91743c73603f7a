"""Requests that the kit asks plugins about, by family and name. No torch here, so that tables can be made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from jackfield.interfaces import (
    OPS,
    QUANTIZING_OPS,
    ROUTING_OPS,
    SAMPLING_OPS,
    STEP_OPS,
    DrafterRequest,
    ExpertsRequest,
    LogitsRequest,
    ModelRequest,
    OpRequest,
    PlatformRequest,
    Plugin,
    QuantizationRequest,
    Request,
    SchedulingRequest,
)
from jackfield.interfaces.drafters import NEEDS
from jackfield.interfaces.moe import LAYOUTS
from jackfield.testing.attention_shapes import attention_samples

Samples = Mapping[str, Request]

EXPERTS = ExpertsRequest(
    subject="4 experts", dtype="float32", num_experts=4, top_k=2, hidden_size=64, intermediate_size=32
)
"""A block whose sizes all layouts can pack; :mod:`jackfield.testing.moe` makes its numbers."""
BLOCKS: Mapping[str, ExpertsRequest] = {
    "silu": EXPERTS,
    "gelu": replace(EXPERTS, activation="gelu"),
    "biases": replace(EXPERTS, needs=frozenset({"bias"})),
    "ungated": replace(EXPERTS, activation="relu2", gated=False, needs=frozenset({"ungated"})),
    "swiglu_oai": replace(EXPERTS, activation="swiglu_oai", needs=frozenset({"bias"})),
    "partial": replace(EXPERTS, needs=frozenset({"partial"})),
}
"""Blocks in the ``dense`` layout, by what is special about them."""
DTYPES = ("float32", "bfloat16", "float16")
STORAGE: Mapping[str, frozenset[str]] = {"gguf": frozenset({"ggml:Q8_0", "ggml:Q4_0", "ggml:F32"})}
"""Types in a checkpoint of each format, where that is not simply the computation type."""
DRAFTS = 3
LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}


def quantization_request(kind: str, dtype: str) -> QuantizationRequest:
    """Return the request for a checkpoint of format ``kind``."""
    storage = STORAGE.get(kind, frozenset({dtype}) if not kind else frozenset())
    return QuantizationRequest(subject=kind or "plain weights", kind=kind, dtype=dtype, storage_dtypes=storage)


def _attention(plugin: type[Plugin]) -> Samples:
    return attention_samples()


def _quantization(plugin: type[Plugin]) -> Samples:
    kinds = sorted(plugin.kinds - {"*"})
    return {
        f"{kind or 'plain weights'}, {dtype}": quantization_request(kind, dtype)
        for kind, dtype in product(kinds, DTYPES)
    }


def _models(plugin: type[Plugin]) -> Samples:
    # What serves any architecture is asked about one that everybody knows.
    kinds = sorted(plugin.kinds - {"*"}) or [LLAMA["architectures"][0]]
    return {
        kind: ModelRequest(
            subject=kind,
            kind=kind,
            task=sorted(getattr(plugin, "tasks", {"generate"}))[0],
            container="gguf" if kind.startswith("gguf:") else "safetensors",
            config={} if "*" not in plugin.kinds else LLAMA,
        )
        for kind in kinds
    }


def _experts(plugin: type[Plugin]) -> Samples:
    dense = {f"dense, {name}": replace(block, kind="dense") for name, block in BLOCKS.items()}
    packed = {layout: replace(EXPERTS, kind=layout) for layout in sorted(LAYOUTS - {"dense"})}
    return {**dense, **packed, "dense, bfloat16": replace(EXPERTS, kind="dense", dtype="bfloat16")}


def _ops(plugin: type[Plugin]) -> Samples:
    names = (*OPS, *QUANTIZING_OPS, *SAMPLING_OPS, *ROUTING_OPS, *STEP_OPS)
    return {
        f"{name}, {dtype}": OpRequest(subject=name, kind=name, dtype=dtype) for name in names for dtype in DTYPES[:2]
    }


def _drafters(plugin: type[Plugin]) -> Samples:
    kind = plugin.name if "*" in plugin.kinds else min(plugin.kinds, default="")
    offers = {"tokens alone": frozenset({"tokens"}), "all": NEEDS}
    return {
        name: DrafterRequest(
            component="drafter",
            subject=kind,
            kind=kind,
            num_tokens=DRAFTS,
            target_architecture="LlamaForCausalLM",
            vocab_size=260,
            offers=offered,
        )
        for name, offered in offers.items()
    }


SAMPLES: Mapping[str, Callable[[type[Plugin]], Samples]] = {
    "attention_backends": _attention,
    "quantization_methods": _quantization,
    "models": _models,
    "moe_experts": _experts,
    "ops": _ops,
    "drafters": _drafters,
    "platforms": lambda plugin: {"devices": PlatformRequest(subject="devices", kind="devices")},
    "scheduling_policies": lambda plugin: {"requests": SchedulingRequest(subject="requests")},
    "logits_processors": lambda plugin: {"by name": LogitsRequest(subject=plugin.name, vocab_size=32)},
}
"""By family: from a plugin class to its requests, equal ones at each call."""
