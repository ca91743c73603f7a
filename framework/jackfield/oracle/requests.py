"""Decisions on what serves requests beside the model: their order, and what changes their logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from jackfield.config.selection import ResolvedSelection
from jackfield.interfaces import (
    DeviceFacts,
    LogitsProcessor,
    LogitsRequest,
    SchedulingPolicy,
    SchedulingRequest,
    TextConfig,
)
from jackfield.oracle.decide import check_names
from jackfield.oracle.resolution import PolicyDecision, ProcessorDecision

if TYPE_CHECKING:
    from jackfield.oracle.pipeline import Bench


def choose_policy(bench: Bench) -> PolicyDecision:
    """Decide the order of requests."""
    word = replace_force(bench.config.scheduling_policy.resolve(), "policy")
    decision = bench.decide("scheduling_policies", SchedulingRequest(subject="requests"), word, "scheduler")
    return PolicyDecision(cast(type[SchedulingPolicy], decision.plugin), bench.registry.settings(decision.ref))


def choose_processors(bench: Bench, model_config: TextConfig, device: DeviceFacts) -> tuple[ProcessorDecision, ...]:
    """Return the logits processors that the user named, in their order."""
    family, names, setting = "logits_processors", bench.config.sampling.logits_processors, "logits_processors"
    everything = ResolvedSelection(prefer=names, prefer_from=setting)
    check_names(bench.registry.refs(family), family, LogitsRequest(), everything, "sampling")
    chosen = []
    for name in names:
        request = LogitsRequest(subject=name, device=device, vocab_size=model_config.vocab_size)
        word = ResolvedSelection(force=name, force_from=setting)
        decision = bench.decide(family, request, word, "sampling")
        processor = cast(type[LogitsProcessor], decision.plugin)
        chosen.append(ProcessorDecision(processor, bench.registry.settings(decision.ref)))
    return tuple(chosen)


def replace_force(word: ResolvedSelection, setting: str) -> ResolvedSelection:
    """Return ``word`` with its force said to come from ``setting``."""
    return ResolvedSelection(word.force, word.prefer, word.exclude, setting, word.prefer_from, word.exclude_from)
