"""The pipeline of decisions: platform → model → quantization → experts → attention → ops → drafter →
scheduling policy → logits processors → reconcile.

Pure: it reads facts, asks plugins, and returns a frozen :class:`Resolution`. No torch, no device, no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from jackfield.checkpoint import JsonConfigReader, format_of, overridden, pooling_defaults, reads
from jackfield.config import EngineConfig
from jackfield.config.selection import ResolvedSelection, Selection
from jackfield.errors import ConfigError, did_you_mean
from jackfield.interfaces import (
    OPS,
    QUANTIZING_OPS,
    ROUTING_OPS,
    SAMPLING_OPS,
    STEP_OPS,
    DeviceFacts,
    ExpertsBackend,
    ExpertsRequest,
    ModelArchitecture,
    ModelFacts,
    ModelRequest,
    OpRequest,
    OpsProvider,
    Platform,
    PlatformRequest,
    QuantizationMethod,
    QuantizationRequest,
    Reason,
    Request,
    Settings,
    TextConfig,
)
from jackfield.interfaces.moe import experts_request
from jackfield.oracle.counterfactual import Counterfactual
from jackfield.oracle.decide import decide, guard_fallback, mark_states
from jackfield.oracle.drafting import (
    DEFAULT_DRAFTS,
    check_draft_layers,
    decide_drafter,
    draft_config,
    drafter_request,
    left_for_drafts,
    look_ahead,
    settle_branches,
    settle_rounds,
)
from jackfield.oracle.judge import probe_reasons
from jackfield.oracle.reconcile import reconcile
from jackfield.oracle.report import DecisionReport, ProposalOutcome
from jackfield.oracle.requests import choose_policy, choose_processors, replace_force
from jackfield.oracle.resolution import (
    DrafterDecision,
    DraftModelDecision,
    OpDecision,
    RecordedRounds,
    Resolution,
)
from jackfield.oracle.scales import attention_of
from jackfield.oracle.verdict import Decision
from jackfield.registry import PluginState, Registry

BATCH_INVARIANT = "batch_invariant"
"""Feature of plugins whose results for a row do not depend on other rows, nor on how many there are."""
ROW_OPS = frozenset({*SAMPLING_OPS, *ROUTING_OPS, *STEP_OPS})
"""What these return for a row never depends on others, whoever provides them."""
INVARIANT_FAMILIES = frozenset({"attention_backends", "quantization_methods", "moe_experts", "ops"})
"""Families whose plugins compute hidden states. Sampling ops work row by row in any case."""
Asked = TypeVar("Asked", bound=Request)


class Bench:
    """Where decisions are made and kept: the registry, the configuration so far, and what was decided."""

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        self.config = config
        self.registry = registry
        self.decisions: list[Decision] = []
        self.proposals: list[ProposalOutcome] = []
        self.notes: list[str] = []
        self.counterfactuals: list[Counterfactual] = []
        self.component = "target"
        """Who everything is decided for."""
        self.branches = False
        """Whether drafts may branch, so that attention must be made for it."""
        self.drafting = False
        """Whether a draft model may have attention of its own."""

    def asked(self, family: str, request: Asked) -> Asked:
        """Return the request as it is decided: whoever keeps it, to build from, keeps this one."""
        if request.component != self.component:
            request = replace(request, component=self.component)
        if self.config.model.batch_invariant and family in INVARIANT_FAMILIES and request.kind not in ROW_OPS:
            request = replace(request, needs=request.needs | {BATCH_INVARIANT})
        return request

    def decide(
        self,
        family: str,
        request: Request,
        selection: ResolvedSelection,
        field: str,
        extra: Callable[[Any, Any], Any] | None = None,
        *,
        keep: bool = True,
    ) -> Decision:
        """Decide one request and, with ``keep``, put it into the report."""
        decision = decide(
            self.registry,
            family,
            self.asked(family, request),
            selection,
            field=field,
            extra=extra,
            origin=lambda setting: str(self.config.origin(setting)),
        )
        if keep:
            self.decisions.append(decision)
        return decision


def resolve(
    config: EngineConfig, facts: ModelFacts, registry: Registry, draft_facts: ModelFacts | None = None
) -> Resolution:
    """Decide everything for one engine.

    Args:
        config: what people said. facts: of the checkpoint. registry: the installed plugins. draft_facts: of the draft
            checkpoint that ``speculative.model`` names.

    Raises:
        ConfigError: settings contradict each other or the model. NoCandidateError: nothing fits a need.
        PluginError: a required plugin does not load. CheckpointError: the checkpoint's configuration is not understood.
    """
    registry.enforce()
    _refuse_idle_words(config, facts)
    bench = Bench(config, registry)
    platform, device = _platform(bench)
    architecture, model_config = _model(bench, facts)
    dtype = _dtype(bench, facts, model_config, device)
    quantization, plain, options = _quantization(bench, facts, device, dtype)
    layout = quantization.experts_layout(quantization.spec_of(facts.quantization_config, options))
    experts = _experts(bench, architecture, model_config, device, dtype, layout)
    look_ahead(bench, facts, architecture, model_config, device, draft_facts)
    attention = attention_of(bench, facts, architecture, model_config, quantization, device, dtype)
    quantizing = QUANTIZING_OPS if "quantized_activations" in quantization.features else ()
    published = [*OPS, *SAMPLING_OPS, *STEP_OPS, *quantizing]
    ops = _ops(bench, published if experts is None else [*published, *ROUTING_OPS], device, dtype)
    drafter = _drafter(bench, facts, architecture, model_config, device, dtype, draft_facts)
    if experts is None and drafter is not None and drafter.model is not None and drafter.model.experts is not None:
        ops |= _ops(bench, list(ROUTING_OPS), device, dtype)
    policy = choose_policy(bench)
    processors = choose_processors(bench, model_config, device)
    drafting = drafter.model.attention if drafter is not None and drafter.model is not None else ()
    drafter = settle_rounds(bench, platform, architecture, drafter, attention)
    config, layers = reconcile(
        bench,
        model_config,
        (*attention, *drafting),
        dtype,
        asynchronous=platform.asynchronous,
        apart=drafter is not None and drafter.rounds is not RecordedRounds.DRAFTED,
    )
    attention, drafting = layers[: len(attention)], layers[len(attention) :]
    if drafter is not None and drafter.model is not None:
        drafter = replace(drafter, model=replace(drafter.model, attention=drafting))
    mark_states(bench.decisions)
    report = DecisionReport.build(
        bench.decisions, proposals=bench.proposals, notes=bench.notes, counterfactuals=bench.counterfactuals
    )
    return Resolution(
        config=config,
        facts=facts,
        platform=platform,
        device=device,
        architecture=architecture,
        model_config=model_config,
        quantization=quantization,
        plain=plain,
        quantization_settings=options,
        experts=experts,
        attention=attention,
        ops=ops,
        drafter=drafter,
        policy=policy,
        processors=processors,
        pooler=_pooler(config, architecture, model_config, facts.path),
        report=report,
    )


def _refuse_idle_words(config: EngineConfig, facts: ModelFacts) -> None:
    """Refuse narrower words on choices that are made once for the whole engine: nothing would ever ask for them.

    Attention is asked layer by layer and checks its own words.
    """
    kinds: dict[str, set[str]] = {
        "ops": {*OPS, *QUANTIZING_OPS, *ROW_OPS},
        "quantization": {facts.quantization},
        "moe": {"dense"},
    }
    for section in ("platform", "quantization", "moe", "ops"):
        known = {"kinds": kinds.get(section, set()), "phases": set(), "layers": set(), "components": {"target"}}
        for part, names in known.items():
            for name in getattr(config.get(section), part):
                if name not in names:
                    raise ConfigError(
                        f"{section}.{part} names '{name}', which nothing asks for",
                        field=f"{section}.{part}",
                        value=name,
                        remedy=did_you_mean(name, names) or f"remove it; known: {', '.join(sorted(names)) or 'none'}",
                    )


def _platform(bench: Bench) -> tuple[type[Platform], DeviceFacts]:
    word = bench.config.platform.resolve()
    decision = bench.decide("platforms", PlatformRequest(kind="devices"), word, "platform", probe_reasons)
    guard_fallback(decision, bench.registry)
    platform = cast(type[Platform], decision.plugin)
    device = platform.facts(0)
    proposals = platform.proposals(bench.config, device)
    bench.config, outcomes = bench.config.with_proposals(proposals)
    owner = decision.ref.label
    for entry in outcomes:
        made = entry.proposal
        note = "" if entry.status == "applied" else f"{entry.status}: {entry.value!r} from {entry.origin}"
        bench.proposals.append(
            ProposalOutcome(made.field, made.value, made.must, made.reason, owner, entry.status == "applied", note)
        )
    return platform, device


def _model(bench: Bench, facts: ModelFacts) -> tuple[type[ModelArchitecture], TextConfig]:
    settings = bench.config.model
    if not reads(settings.load_format, facts):
        raise ConfigError(
            f"load_format is {settings.load_format}, but the model is a {format_of(facts)} checkpoint",
            field="model.load_format",
            value=settings.load_format,
            remedy="leave load_format out, or name a model in that format",
        )
    decision = _architecture(bench, facts)
    architecture = cast(type[ModelArchitecture], decision.plugin)
    if settings.task == "auto":
        task = "generate" if "generate" in architecture.tasks else "pool"
        bench.config = bench.config.with_derived({"model.task": task}, "what the architecture is made for")
    keys: dict[str, Any] = dict(facts.config)
    if facts.container == "gguf":
        shapes = {name: tensor.shape for name, tensor in facts.tensors.items()}
        keys = dict(architecture.gguf_config(facts.config, shapes))
    reader = JsonConfigReader(overridden(keys, settings.hf_overrides), facts.path)
    model_config = architecture.config(reader)
    reader.finish(settings.allow_unused_config_keys)
    return architecture, model_config


def choose_architecture(config: EngineConfig, facts: ModelFacts, registry: Registry) -> Decision:
    """Decide only which plugin builds a model.

    Args:
        config: what people said. facts: of the checkpoint; with an empty ``config`` the question is about the
            architecture. registry: the installed plugins.

    Raises:
        NoCandidateError: no plugin does.
    """
    return _architecture(Bench(config, registry), facts)


def _architecture(bench: Bench, facts: ModelFacts) -> Decision:
    settings = bench.config.model
    word = replace_force(bench.config.model_implementation.resolve(), "implementation")
    request = ModelRequest(
        kind=facts.architecture,
        task=settings.task,
        container=facts.container,
        quantization=facts.quantization,
        config=overridden(facts.config, settings.hf_overrides),
        rivals=() if word.force else _own_plugins(bench.registry, facts.architecture),
    )
    return bench.decide("models", request, word, "model", _task_reasons)


def _own_plugins(registry: Registry, kind: str) -> tuple[str, ...]:
    """Return the plugins that name an architecture, those that do not load included: whatever is wrong with them, the
    fallback does not hide it.
    """
    refs = [ref for ref in registry.refs("models") if ref.state is not PluginState.DISABLED]
    return tuple(ref.name for ref in refs if ref.name == kind or ((made := ref.load()) and kind in made.kinds))


def _pooler(config: EngineConfig, architecture: type[ModelArchitecture], model_config: TextConfig, path: str) -> Any:
    """Return how hidden states become results, or None for an engine that generates."""
    if config.model.task != "pool":
        return None
    own = architecture.pooler(model_config)
    said = pooling_defaults(path)
    if said is None:
        return own
    size = said.projections[-1].outputs if said.projections else own.size
    if said.method is None:
        own = replace(own, late_interaction=True)
    method = said.method or own.method
    return replace(own, method=method, normalize=said.normalize, size=size, projections=said.projections)


def _task_reasons(plugin: Any, request: Any) -> list[Reason]:
    if request.component == "target" and plugin.tasks == {"draft"}:
        remedy = "name the model that it drafts for, and this one in speculative.model"
        return [Reason("task", "task", "it drafts for another model and cannot be served alone", remedy)]
    if request.task == "auto" or request.task in plugin.tasks:
        return []
    return [Reason("task", "task", f"'{request.task}' is not one of {', '.join(sorted(plugin.tasks))}")]


def _dtype(bench: Bench, facts: ModelFacts, model_config: TextConfig, device: DeviceFacts) -> str:
    wanted = str(bench.config.model.dtype)
    if wanted != "auto":
        return wanted
    dtype, why = model_config.dtype or facts.dtype, "the checkpoint's own type"
    if not dtype or (facts.container == "gguf" and device.type == "cpu"):
        # Packed numbers have no type to compute in, and in this container half precision is for storage.
        dtype, why = ("float32", "of a CPU") if device.type == "cpu" else ("bfloat16", "of an accelerator")
        why = f"the usual type {why}: the checkpoint says none to compute in"
    bench.config = bench.config.with_derived({"model.dtype": dtype}, why)
    return dtype


def _quantization(
    bench: Bench, facts: ModelFacts, device: DeviceFacts, dtype: str
) -> tuple[type[QuantizationMethod], type[QuantizationMethod], Settings]:
    request = QuantizationRequest(
        subject=facts.quantization or "nothing is quantized",
        kind=facts.quantization,
        dtype=dtype,
        device=device,
        config=facts.quantization_config,
        storage_dtypes=frozenset(tensor.dtype for tensor in facts.tensors.values()),
    )
    word = bench.config.quantization.resolve(kind=facts.quantization)
    decision = bench.decide("quantization_methods", request, word, "quantization")
    method = cast(type[QuantizationMethod], decision.plugin)
    options = bench.registry.settings(decision.ref)
    if not facts.quantization and not method.opt_in:
        return method, method, options
    left = replace(request, subject="layers left alone", kind="", storage_dtypes=frozenset())
    plain = bench.decide("quantization_methods", left, ResolvedSelection(), "quantization")
    return method, cast(type[QuantizationMethod], plain.plugin), options


def experts_asked(
    config: EngineConfig,
    architecture: type[ModelArchitecture],
    model_config: TextConfig,
    device: DeviceFacts,
    dtype: str,
    layout: str,
) -> ExpertsRequest | None:
    """Return what a model's blocks of experts ask for, or None where it has none; ``layout`` is of their matrices."""
    blocks = architecture.experts(model_config)
    if blocks is None:
        return None
    ranks = config.parallel.tensor_parallel_size
    return experts_request(blocks, layout, dtype=dtype, device=device, ranks=ranks)


def _experts(
    bench: Bench,
    architecture: type[ModelArchitecture],
    model_config: TextConfig,
    device: DeviceFacts,
    dtype: str,
    layout: str,
) -> type[ExpertsBackend] | None:
    request = experts_asked(bench.config, architecture, model_config, device, dtype, layout)
    if request is None:
        _refuse_unused(bench, "moe", bench.config.moe, "the model has no experts")
        return None
    decision = bench.decide("moe_experts", request, bench.config.moe.resolve(kind=layout), "moe")
    return cast(type[ExpertsBackend], decision.plugin)


def _ops(bench: Bench, names: Sequence[str], device: DeviceFacts, dtype: str) -> dict[str, OpDecision]:
    chosen = {}
    for op in names:
        request = bench.asked("ops", OpRequest(subject=op, kind=op, dtype=dtype, device=device))
        word = bench.config.ops.resolve(kind=op)
        decision = bench.decide("ops", request, word, "ops")
        provider = cast(type[OpsProvider], decision.plugin)
        named = bool(word.force or word.prefer)
        chosen[op] = OpDecision(provider, request, bench.registry.settings(decision.ref), named)
    return chosen


def _drafter(
    bench: Bench,
    facts: ModelFacts,
    architecture: type[ModelArchitecture],
    model_config: TextConfig,
    device: DeviceFacts,
    dtype: str,
    draft_facts: ModelFacts | None,
) -> DrafterDecision | None:
    wish = bench.config.speculative
    if wish.method is None:
        return None
    request = drafter_request(bench, facts, architecture, model_config, device, draft_facts)
    count = request.num_tokens
    drafter, settings = decide_drafter(bench, request, keep=True)
    if wish.model is not None and "draft_checkpoint" not in drafter.needs:
        raise ConfigError(
            f"drafter {drafter.name} needs no draft model",
            field="speculative.model",
            value=wish.model,
            remedy="leave speculative.model out, or name a drafter that needs one",
        )
    for name in ("draft_sample_method", "rejection_sample_method"):
        field = f"speculative.{name}"
        if bench.config.get(field) != type(wish).model_fields[name].default and not drafter.draws:
            raise ConfigError(
                f"drafter {drafter.name} draws nothing: its drafts are certain",
                field=field,
                value=bench.config.get(field),
                remedy=f"leave {field} out, or name a drafter with a model",
            )
    if drafter.branches(settings):
        settle_branches(bench, drafter, count)
    bench.config = bench.config.with_derived(
        {"speculative.num_speculative_tokens": count}, f"default of {DEFAULT_DRAFTS} drafts"
    )
    own = "draft_layers" in drafter.needs
    if own:
        draft_facts = left_for_drafts(facts, architecture, model_config)
    elif draft_facts is not None:
        keys = drafter.completed(draft_facts.config, request)
        draft_facts = replace(draft_facts, architecture=drafter.architecture(draft_facts.architecture), config=keys)
    model = None if draft_facts is None else _draft_model(bench, draft_facts, device, dtype, own=own)
    return DrafterDecision(drafter, request, settings, model)


def _draft_model(bench: Bench, facts: ModelFacts, device: DeviceFacts, dtype: str, *, own: bool) -> DraftModelDecision:
    """Decide who runs a draft checkpoint: as for a model of its own, of the target's type. ``own``: it is part of the
    target's.
    """
    inner = Bench(draft_config(bench.config, facts.path, dtype, own=own), bench.registry)
    inner.component, inner.branches = "drafter", bench.branches
    architecture, model_config = _model(inner, facts)
    if own:
        check_draft_layers(bench.config, facts, architecture, model_config)
    quantization, left, options = _quantization(inner, facts, device, dtype)
    layout = quantization.experts_layout(quantization.spec_of(facts.quantization_config, options))
    experts = _experts(inner, architecture, model_config, device, dtype, layout)
    attention = attention_of(inner, facts, architecture, model_config, quantization, device, dtype)
    bench.decisions += inner.decisions
    bench.counterfactuals += inner.counterfactuals
    bench.notes += inner.notes
    bench.proposals += inner.proposals
    return DraftModelDecision(
        facts=facts,
        architecture=architecture,
        model_config=model_config,
        dtype=dtype,
        quantization=quantization,
        plain=left,
        attention=attention,
        experts=experts,
        quantization_settings=options,
        load_format=inner.config.model.load_format,
    )


def _refuse_unused(bench: Bench, section: str, selection: Selection, why: str) -> None:
    if bench.config.is_user_set(section) and selection != Selection():
        raise ConfigError(
            f"{section} has a choice, but {why}", field=section, value=selection.force, remedy=f"remove {section}"
        )
