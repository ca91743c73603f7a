"""Decisions on attention: per group of like layers and per phase, with cache layouts that fit together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from jackfield.config import EngineConfig
from jackfield.config.selection import ResolvedSelection, Selection, layer_matches
from jackfield.errors import ConfigError, did_you_mean
from jackfield.interfaces import (
    AttentionBackend,
    AttentionGroup,
    AttentionRequest,
    CacheSpec,
    DeviceFacts,
    ModelArchitecture,
    RankInfo,
    Reason,
    TextConfig,
    intersect,
)
from jackfield.interfaces.attention import PHASES
from jackfield.oracle.counterfactual import counterfactuals
from jackfield.oracle.resolution import AttentionDecision
from jackfield.oracle.verdict import Decision

if TYPE_CHECKING:
    from jackfield.oracle.pipeline import Bench

PHASE_FEATURES: Mapping[str, frozenset[str]] = {
    "": frozenset({"prefill", "chunked_prefill", "decode", "mixed"}),
    "prefill": frozenset({"prefill", "chunked_prefill"}),
    "decode": frozenset({"decode"}),
}
SCALED_TYPES = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Storage types that scales of a checkpoint are for: the others have scales of their own, token by token."""
SOFTMAX_KINDS = frozenset({"full", "sliding", "chunked_local", "encoder", "cross"})
"""Kinds whose values have heads as keys have; elsewhere they are of another size by nature."""
COMPONENTS = ("target", "drafter")
"""Who has attention of its own; encoders join when they bring layers."""


def decide_attention(
    bench: Bench,
    architecture: type[ModelArchitecture],
    model_config: TextConfig,
    device: DeviceFacts,
    dtype: str,
    scaled: frozenset[int] = frozenset(),
) -> tuple[AttentionDecision, ...]:
    """Return one decision for each bucket of layers that are alike and about which the user said the same. Words on the
    drafter's layers are its component's, and those without a component; storage types by layer are the target's. Of the
    layers ``scaled`` the checkpoint has scales for a cache of 8-bit floats.
    """
    groups, component = architecture.attention_groups(model_config), bench.component
    if component == "target":
        components = COMPONENTS if bench.drafting else COMPONENTS[:1]
        _check_words(bench.config.attention, groups, model_config.num_layers, components)
        _check_layers("cache.layer_dtypes", bench.config.cache.layer_dtypes, model_config.num_layers)
    cache = bench.config.cache
    longest = bench.config.model.max_model_len or model_config.max_position
    made = []
    for group in groups:
        request = AttentionRequest(
            component=component,
            subject=group.name,
            kind=group.kind,
            needs=_needs(bench, group) | _long_needs(bench, group, longest),
            dtype=dtype,
            device=device,
            layers=group.layers,
            num_heads=group.num_heads,
            num_kv_heads=group.num_kv_heads,
            head_size=group.head_size,
            value_head_size=group.value_head_size or group.head_size,
            scale=group.scale,
            window=group.window,
            softcap=group.softcap,
            cache_dtype=storage_type(cache.cache_dtype, dtype),
            block_size=cache.block_size if bench.config.is_user_set("cache.block_size") else None,
            rank=RankInfo(0, bench.config.parallel.tensor_parallel_size),
            extra=group.extra,
        )
        buckets = _buckets(bench.config, group, dtype, component)
        for number, (layers, words, stored) in enumerate(buckets):
            name = group.name if len(buckets) == 1 else f"{group.name}.{number}"
            needs = request.needs | ({"cache_scales"} if stored in SCALED_TYPES and scaled & {*layers} else frozenset())
            asked = replace(request, subject=name, layers=layers, cache_dtype=stored, needs=needs)
            asked = bench.asked("attention_backends", asked)
            made.append(_decide_bucket(bench, asked, words))
    if component != "target":
        return tuple(replace(decision, name=f"{component}.{decision.name}") for decision in made)
    return tuple(made)


def _needs(bench: Bench, group: AttentionGroup) -> frozenset[str]:
    """Return what a group needs, whatever the length of texts."""
    unlike = group.kind in SOFTMAX_KINDS and group.value_head_size not in (0, group.head_size)
    there = {"softcap": bool(group.softcap), "diff_kv": unlike, "tree": bench.branches}
    return group.features | {name for name, is_there in there.items() if is_there}


def _long_needs(bench: Bench, group: AttentionGroup, longest: int) -> frozenset[str]:
    """Return what a group needs because texts may be that long; the report says what shorter ones would save."""
    needed = {name: limit for name, limit in group.long_features.items() if longest > limit}
    if needed and not bench.config.is_user_set("model.max_model_len"):
        bench.notes.append(
            f"attention '{group.name}' needs {', '.join(sorted(needed))} for texts of up to {longest} tokens; with "
            f"max_model_len at {min(needed.values())} or less more backends would fit"
        )
    return frozenset(needed)


Words = tuple[ResolvedSelection, ...]
"""The user's word for both phases at once, or for each of PHASES."""


def _buckets(
    config: EngineConfig, group: AttentionGroup, dtype: str, component: str
) -> list[tuple[tuple[int, ...], Words, str]]:
    """Return the group's layers by what the user said about them: words on backends, and the storage type."""
    found: list[tuple[list[int], Words, str]] = []
    for layer in group.layers:
        path = f"layers.{layer}.attention"
        place: dict[str, Any] = {"kind": group.kind, "layer": layer, "path": path, "component": component}
        words: Words = tuple(config.attention.resolve(phase=phase, **place) for phase in PHASES)
        if words[0] == words[1]:
            words = words[:1]
        by_layer = config.cache.layer_dtypes if component == "target" else {}
        own = [kind for key, kind in by_layer.items() if layer_matches(key, layer, path)]
        stored = storage_type(own[-1] if own else config.cache.cache_dtype, dtype)
        known = next((layers for layers, said, kind in found if (said, kind) == (words, stored)), None)
        if known is None:
            found.append(([layer], words, stored))
        else:
            known.append(layer)
    return [(tuple(layers), words, stored) for layers, words, stored in found]


STORAGE_WORDS = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
}
"""Other words for storage types."""


def storage_type(word: str, dtype: str) -> str:
    """Return the storage type that a setting means, in torch's words where torch has one."""
    return dtype if word == "auto" else STORAGE_WORDS.get(word, word)


def _decide_bucket(bench: Bench, request: AttentionRequest, words: Words) -> AttentionDecision:
    phases = ("",) if len(words) == 1 else PHASES
    decisions = []
    for phase, word in zip(phases, words, strict=True):
        phased = replace(request, phase=phase, needs=request.needs | PHASE_FEATURES[phase])
        decisions.append(bench.decide("attention_backends", phased, word, "attention", _cache_reasons))
        _explain_user_values(bench, phased, word)
    backends = [cast(type[AttentionBackend], decision.plugin) for decision in decisions]
    spec = _agree_on_layout(request, backends)
    settings = bench.registry.settings(decisions[0].ref)
    return AttentionDecision(request.subject, request, backends[0], backends[-1], spec, settings)


def _cache_reasons(plugin: Any, request: Any) -> list[Reason]:
    """Reject a backend that has no layout, or none for the block size that the user set."""
    specs = plugin.cache_specs(request)
    if not specs:
        remedy = "leave cache.cache_dtype out"
        return [Reason("no_cache_layout", "cache_dtype", f"no layout for a cache of {request.cache_dtype}", remedy)]
    if request.block_size is None or any(_allows(spec, request.block_size) for spec in specs):
        return []
    remedy = f"leave cache.block_size out, or use a size that {plugin.name} takes"
    return [Reason("block_size", "block_size", f"no layout for blocks of {request.block_size} tokens", remedy)]


def _allows(spec: CacheSpec, size: int) -> bool:
    return spec.per != "block" or spec.block_sizes.allows(size)


def _agree_on_layout(request: AttentionRequest, backends: list[type[AttentionBackend]]) -> CacheSpec:
    first, last = backends[0], backends[-1]
    layouts = [
        [spec for spec in b.cache_specs(request) if request.block_size is None or _allows(spec, request.block_size)]
        for b in (first, last)
    ]
    spec = layouts[0][0] if first is last else intersect(*layouts)
    if spec is None:
        raise ConfigError(
            f"attention '{request.subject}': prefill by {first.name} and decode by {last.name} share no cache layout",
            field="attention.phases",
            value=f"{first.name}, {last.name}",
            remedy="use one backend for both phases, or two that store keys and values alike",
        )
    if first is not last:
        other = next(s for s in layouts[1] if s.same_storage(spec))
        spec = replace(spec, block_sizes=_both(spec, other))
    return spec


def _both(first: CacheSpec, second: CacheSpec) -> Any:
    from math import lcm

    a, b = first.block_sizes, second.block_sizes
    only = tuple(size for size in (a.only or b.only) if a.allows(size) and b.allows(size))
    return replace(
        a,
        multiple_of=lcm(a.multiple_of, b.multiple_of),
        smallest=max(a.smallest, b.smallest),
        largest=min(a.largest, b.largest),
        only=only,
    )


def _explain_user_values(bench: Bench, request: AttentionRequest, word: ResolvedSelection) -> None:
    """Report values of the user that kept a better backend out."""

    def again(other: AttentionRequest) -> Decision:
        return bench.decide("attention_backends", other, word, "attention", _cache_reasons, keep=False)

    relax = {
        "cache.block_size": lambda r: replace(r, block_size=None),
        "cache.cache_dtype": lambda r: replace(r, cache_dtype=r.dtype),
    }
    user_set = {name: bench.config.get(name) for name in relax if bench.config.is_user_set(name)}
    bench.counterfactuals += counterfactuals(again, request, user_set, relax)


def _check_words(
    selection: Selection, groups: tuple[AttentionGroup, ...], layers: int, components: tuple[str, ...]
) -> None:
    """Refuse words about phases, kinds, layers and components that the model does not have: they would do nothing."""
    kinds = {group.kind for group in groups}
    known = {"phases": set(PHASES), "kinds": kinds, "components": set(components)}
    for part, names in known.items():
        for name, inner in getattr(selection, part).items():
            if name not in names:
                raise ConfigError(
                    f"attention.{part} names '{name}', which this model does not have",
                    field=f"attention.{part}",
                    value=name,
                    remedy=did_you_mean(name, names) or f"it has: {', '.join(sorted(names))}",
                )
            if name != "drafter":  # whose layers are others
                _check_words(inner, groups, layers, components)
    for key, inner in selection.layers.items():
        _check_layers("attention.layers", [key], layers)
        _check_words(inner, groups, layers, components)


def _check_layers(field: str, keys: Iterable[str], layers: int) -> None:
    """Refuse words about layers that match none."""
    for key in keys:
        if not any(layer_matches(key, layer, f"layers.{layer}.attention") for layer in range(layers)):
            raise ConfigError(
                f"{field} names '{key}', which matches no layer",
                field=field,
                value=key,
                remedy=f"layers are 0 to {layers - 1}, their paths layers.N.attention",
            )
