"""The choice of a drafter, and what follows where its drafts branch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from jackfield.config import EngineConfig
from jackfield.errors import ConfigError
from jackfield.interfaces import (
    MOST_BRANCHES,
    DeviceFacts,
    Drafter,
    DrafterRequest,
    GraphSupport,
    HostLengths,
    ModelArchitecture,
    ModelFacts,
    Platform,
    Plugin,
    Reason,
    Settings,
    TextConfig,
    WeightMap,
)
from jackfield.interfaces.facts import split_name
from jackfield.oracle.requests import replace_force
from jackfield.oracle.resolution import AttentionDecision, DrafterDecision, RecordedRounds

if TYPE_CHECKING:
    from jackfield.oracle.pipeline import Bench

DEFAULT_DRAFTS = 4
"""Drafts per step when the user names a drafter and no number."""


def drafter_request(
    bench: Bench,
    facts: ModelFacts,
    architecture: type[ModelArchitecture],
    model_config: TextConfig,
    device: DeviceFacts,
    draft_facts: ModelFacts | None,
) -> DrafterRequest:
    """Return what a drafter is asked for, and what this engine offers it."""
    wish = bench.config.speculative
    return DrafterRequest(
        subject=wish.method or "",
        kind=wish.method or "",
        device=device,
        num_tokens=wish.num_speculative_tokens or DEFAULT_DRAFTS,
        target_architecture=facts.architecture,
        vocab_size=model_config.vocab_size,
        target_layers=model_config.num_layers,
        hidden_size=model_config.hidden_size,
        offers=frozenset(
            {"tokens", "draft_cache", "last_hidden"}
            | ({"taps"} if "taps" in architecture.features else set())
            | ({"draft_checkpoint"} if draft_facts else set())
            | ({"draft_layers"} if architecture.draft_layers else set())
        ),
        model=wish.model or "",
    )


def decide_drafter(bench: Bench, request: DrafterRequest, *, keep: bool) -> tuple[type[Drafter], Settings]:
    """Return the drafter of a request, and its options; with ``keep`` the decision is part of the report."""
    word = replace_force(bench.config.drafter.resolve(), "method")
    decision = bench.decide("drafters", request, word, "speculative", need_reasons, keep=keep)
    return cast(type[Drafter], decision.plugin), bench.registry.settings(decision.ref)


def look_ahead(
    bench: Bench,
    facts: ModelFacts,
    architecture: type[ModelArchitecture],
    model_config: TextConfig,
    device: DeviceFacts,
    draft_facts: ModelFacts | None,
) -> None:
    """Note what the target's attention must know of the drafter, though it is reported on behind it."""
    if bench.config.speculative.method is None:
        return
    request = drafter_request(bench, facts, architecture, model_config, device, draft_facts)
    drafter, settings = decide_drafter(bench, request, keep=False)
    bench.branches = drafter.branches(settings)
    bench.drafting = draft_facts is not None or "draft_layers" in drafter.needs


def settle_branches(bench: Bench, drafter: type[Drafter], count: int) -> None:
    """Settle what follows for drafts that branch.

    Raises:
        ConfigError: settings do not go with it.
    """
    if count > MOST_BRANCHES:
        raise ConfigError(
            f"drafts of {drafter.name} branch, and of those there may be {MOST_BRANCHES}",
            field="speculative.num_speculative_tokens",
            value=count,
            remedy=f"use {MOST_BRANCHES} or less",
        )
    if bench.config.speculative.rejection_sample_method == "block":
        raise ConfigError(
            f"drafts of {drafter.name} branch, and blocks are of chains",
            field="speculative.rejection_sample_method",
            value="block",
            remedy="leave speculative.rejection_sample_method out",
        )
    bench.config = bench.config.with_derived({"speculative.adaptive": False}, "branches are of a fixed number")


def recorded_rounds(
    platform: type[Platform],
    architecture: type[ModelArchitecture],
    drafter: DrafterDecision,
    attention: Sequence[AttentionDecision],
) -> RecordedRounds:
    """Return what of a round can be recorded, by what the platform, the model and every backend say of themselves.

    Args:
        attention: of the target. A draft model's is in ``drafter``.
    """
    if not platform.asynchronous or not architecture.recordable:
        return RecordedRounds.NONE
    tokens = drafter.request.num_tokens + 1
    if drafter.drafter.branches(drafter.settings) or not all(_recordable(one, tokens) for one in attention):
        return RecordedRounds.NONE
    own = drafter.model.attention if drafter.model is not None else ()
    able = drafter.drafter.graph_support >= GraphSupport.UNIFORM and all(_recordable(one, tokens) for one in own)
    return RecordedRounds.DRAFTED if able else RecordedRounds.VERIFIED


def _recordable(decision: AttentionDecision, tokens: int) -> bool:
    """Return whether steps of so many tokens of each sequence can be recorded: no state goes back behind a draft."""
    both = (decision.prefill, decision.decode)
    if decision.spec.per == "sequence" or any(part.host_lengths is HostLengths.EXACT for part in both):
        return False
    several, one = (part.recorded_query(decision.request) for part in both)
    return several >= tokens and one >= 1


def settle_rounds(
    bench: Bench,
    platform: type[Platform],
    architecture: type[ModelArchitecture],
    drafter: DrafterDecision | None,
    attention: Sequence[AttentionDecision],
) -> DrafterDecision | None:
    """Settle how far rounds are recorded, and what follows from that; arguments as in :func:`recorded_rounds`."""
    if drafter is None:
        return None
    rounds = recorded_rounds(platform, architecture, drafter, attention)
    overlap = "" if rounds is RecordedRounds.DRAFTED else "; steps with drafts do not overlap"
    bench.notes.append(f"rounds of speculation: {rounds.value}{overlap}")
    if drafter.drafter.draws and bench.config.speculative.draft_sample_method == "auto":
        method = "greedy" if rounds is RecordedRounds.DRAFTED else "probabilistic"
        why = f"rounds of speculation are {rounds.value}"
        bench.config = bench.config.with_derived({"speculative.draft_sample_method": method}, why)
    return replace(drafter, rounds=rounds)


def need_reasons(plugin: type[Plugin], request: Any) -> list[Reason]:
    """Return reasons against a drafter that needs what the engine of the request does not offer."""
    lacking = sorted(cast(type[Drafter], plugin).needs - request.offers)
    remedies = {
        "draft_checkpoint": "name the draft model in speculative.model",
        "draft_layers": f"no plugin builds such layers for {request.target_architecture}; use another drafter",
    }
    return [
        Reason("need", "offers", f"it needs {need}, which this engine does not offer", remedies.get(need, ""))
        for need in lacking
    ]


def left_for_drafts(facts: ModelFacts, architecture: type[ModelArchitecture], model_config: TextConfig) -> ModelFacts:
    """Return a target's checkpoint as one of the layers in it that only draft: of its tensors those that the target
    leaves alone, so that nothing is read twice and nothing is lost unseen.
    """
    ignored = [re.compile(pattern) for pattern in _weights(facts, architecture, model_config).ignore]
    left = {name: tensor for name, tensor in facts.tensors.items() if any(p.fullmatch(name) for p in ignored)}
    return replace(facts, architecture=architecture.draft_layers, tensors=left)


def draft_config(config: EngineConfig, path: str, dtype: str, *, own: bool) -> EngineConfig:
    """Return the configuration that a draft model is decided by. What the user said on how to read and quantize a model
    is about the target's checkpoint (``own``: about layers in it that only draft, too); on who builds it, about the
    target.
    """
    target = config.model
    if own:
        model = target.model_copy(update={"dtype": dtype, "task": "auto", "implementation": "auto"})
        return config.model_copy(update={"model": model})
    load_format = "dummy" if target.load_format == "dummy" else "auto"
    said = {"model": path, "dtype": dtype, "batch_invariant": target.batch_invariant, "load_format": load_format}
    said["max_model_len"] = target.max_model_len
    model = type(target).model_validate(said)
    plain = {"model": model, "quantization": type(config.quantization)(), "moe": type(config.moe)()}
    return config.model_copy(update=plain)


def check_draft_layers(
    config: EngineConfig, facts: ModelFacts, architecture: type[ModelArchitecture], model_config: TextConfig
) -> None:
    """Refuse a checkpoint that has no layers that only draft.

    Args:
        facts: of the part of the checkpoint that the target leaves alone. architecture: of such layers.

    Raises:
        ConfigError: none of its tensors belongs to one. Where weights are made up, the configuration's word is taken.
    """
    if config.model.load_format == "dummy":
        return
    sources = {rule.source for rule in _weights(facts, architecture, model_config).rules}
    if not any(split_name(name, facts.tensors)[0] in sources or name in sources for name in facts.tensors):
        raise ConfigError(
            "the checkpoint has no layers that only draft, though its architecture may have some",
            field="speculative.method",
            value=config.speculative.method,
            remedy="use another drafter, or a checkpoint that was saved with them",
        )


def _weights(facts: ModelFacts, architecture: type[ModelArchitecture], model_config: TextConfig) -> WeightMap:
    container = "safetensors" if facts.container == "config" else facts.container
    return architecture.weight_map(model_config, container)
