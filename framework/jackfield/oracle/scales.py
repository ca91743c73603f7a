"""Attention of a checkpoint that may ship scales of its cache: what becomes of them is part of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jackfield.checkpoint import CacheScales, find_cache_scales
from jackfield.interfaces import DeviceFacts, ModelArchitecture, ModelFacts, QuantizationMethod, TextConfig
from jackfield.oracle.attention import decide_attention
from jackfield.oracle.resolution import AttentionDecision

if TYPE_CHECKING:
    from jackfield.oracle.pipeline import Bench


def attention_of(
    bench: Bench,
    facts: ModelFacts,
    architecture: type[ModelArchitecture],
    model_config: TextConfig,
    method: type[QuantizationMethod],
    device: DeviceFacts,
    dtype: str,
) -> tuple[AttentionDecision, ...]:
    """Return the decisions on a checkpoint's attention, as :func:`decide_attention` makes them: where a cache is of
    8-bit floats and the checkpoint has scales for it, backends must apply them.

    Raises:
        CheckpointError: the checkpoint's scales contradict each other.
    """
    scheme = method.cache_scheme(method.parse(facts.quantization_config))
    scales = CacheScales()
    if scheme is not None and any(scheme.is_scale(name) for name in facts.tensors):
        container = "safetensors" if facts.container == "config" else facts.container
        scales = find_cache_scales(scheme, facts.tensors, architecture.weight_map(model_config, container))
    made = decide_attention(bench, architecture, model_config, device, dtype, frozenset(scales.layers))
    _note(bench, scales, made)
    return made


def _note(bench: Bench, scales: CacheScales, decisions: Sequence[AttentionDecision]) -> None:
    """Say which scales are applied, which are not, and why."""
    scaled = {
        layer for made in decisions if "cache_scales" in made.request.needs for layer in made.request.layers
    } & scales.layers.keys()
    applied = list(dict.fromkeys(name for layer in sorted(scaled) for name in scales.layers[layer].values()))
    left = [name for name in scales.used if name not in applied]
    if applied:
        bench.notes.append(f"{len(applied)} scales of the checkpoint's cache ({applied[0]}, ...) are applied")
    if left:
        bench.notes.append(
            f"{len(left)} scales of a quantized cache in the checkpoint ({left[0]}, ...) are not applied: the cache "
            "of their layers is not in 8-bit floats; set cache.cache_dtype to fp8 for one that is"
        )
    if scales.idle:
        bench.notes.append(
            f"{len(scales.idle)} scales of the checkpoint ({scales.idle[0]}, ...) have no use: they are of no layer's "
            "cached keys or values"
        )
