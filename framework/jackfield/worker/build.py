"""Putting a rank together from what the oracle decided: model, weights, attention, sampler."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jackfield.checkpoint import CacheScales, cache_scales_path, find_cache_scales
from jackfield.checkpoint.sharded_state import StateLayout, is_sharded_state
from jackfield.errors import CheckpointError, ConfigError
from jackfield.interfaces import (
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    CacheSpec,
    Communicator,
    Drafter,
    DrafterRequest,
    LayerInfo,
    LinearScheme,
    LogitsProcessor,
    ModelArchitecture,
    ModelFacts,
    OpRequest,
    OpsProvider,
    Platform,
    PoolerConfig,
    QuantizationMethod,
    Settings,
    TextConfig,
    WeightMap,
)
from jackfield.interfaces.moe import ExpertsBackend
from jackfield.layers.builder import BuildPlan, LayerAttention, LayerBuilder
from jackfield.layers.composite import Composite
from jackfield.loader import (
    READERS,
    ReadAhead,
    fill_weights,
    finalize,
    load_dummy,
    load_sharded_state,
    open_stream,
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backend of some like layers, with the request it was chosen for and the cache layout agreed on.

    Args:
        name: unique among the model's choices. backend: the class, or :class:`jackfield.layers.composite.Composite`.
        part: the layers, where they are not all of the request's.
    """

    name: str
    backend: type[AttentionBackend] | Composite
    request: AttentionRequest
    spec: CacheSpec
    settings: Settings = field(default_factory=Settings)
    part: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers."""
        return self.part or self.request.layers


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Everything a worker needs, decided before it starts. Classes are frozen targets: a worker searches for nothing.

    Args:
        config: view of the resolved configuration. facts: of the checkpoint. model_config: the architecture's. dtype:
            computation type.
        max_model_len, max_num_seqs, block_size: sizes. fit_length: whether max_model_len may be lowered to the cache.
            num_blocks, kv_cache_memory: of the cache, or None to measure. step_tokens: most tokens of a sequence that
            are computed before the steps that did so are accounted.
        plain: the method for layers that the checkpoint's method leaves alone. ops: provider, request and settings by
            op. processors: logits processors in order, with their settings.
        open_tensors: opens the checkpoint. pooler: how hidden states become results, or None. quantization_settings:
            options of the quantization method. named_ops: ops whose provider the user named. draft: the draft model, or
            None. vocabulary: of a draft model: the target's id of each token, or None where they are the same.
            rounds_verified, rounds_drafted: what of rounds of speculation is recorded.
    """

    config: Any
    facts: ModelFacts
    platform: type[Platform]
    architecture: type[ModelArchitecture]
    model_config: TextConfig
    quantization: type[QuantizationMethod]
    plain: type[QuantizationMethod]
    attention: tuple[AttentionChoice, ...]
    ops: Mapping[str, tuple[type[OpsProvider], OpRequest, Settings]]
    experts: type[ExpertsBackend] | None
    drafter: type[Drafter] | None
    drafter_request: DrafterRequest | None
    drafter_settings: Settings
    dtype: str
    block_size: int
    max_model_len: int
    fit_length: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    step_tokens: int
    num_drafts: int
    num_blocks: int | None
    kv_cache_memory: int | None
    memory_utilization: float
    load_format: str
    seed: int
    open_tensors: Callable[[ModelFacts], Any]
    processors: tuple[tuple[type[LogitsProcessor], Settings], ...] = ()
    pooler: PoolerConfig | None = None
    quantization_settings: Settings = field(default_factory=Settings)
    named_ops: frozenset[str] = frozenset()
    draft: WorkerSpec | None = None
    vocabulary: Any = None
    rounds_verified: bool = False
    rounds_drafted: bool = False


def build_model(
    spec: WorkerSpec, device: torch.device, communicator: Communicator, progress: Progress | None = None
) -> nn.Module:
    """Return the model with its weights, ready to run."""
    model = make_model(spec, device, communicator)
    if spec.load_format != "dummy" and is_sharded_state(Path(spec.facts.path)):
        threads = spec.config.get("model.load_threads")
        load_sharded_state(model, spec.facts, state_layout(spec), threads=threads, progress=progress)
    elif spec.load_format == "dummy":
        load_dummy(model, spec.seed)
    else:
        fill_model(spec, model, device, progress)
        finalize(model)
    return model


def make_model(spec: WorkerSpec, device: torch.device, communicator: Communicator) -> nn.Module:
    """Return the model, its parameters allocated and not filled."""
    weights = weight_map(spec)
    method_spec = spec.quantization.spec_of(spec.facts.quantization_config, spec.quantization_settings)

    def scheme(info: LayerInfo) -> LinearScheme | None:
        return spec.quantization.scheme(info, method_spec)

    def plain(info: LayerInfo) -> LinearScheme:
        found = spec.plain.scheme(info, None)
        if found is None:
            raise ConfigError(f"no method can run {info.name} unquantized", field="quantization", value=spec.plain.name)
        return found

    plan = BuildPlan(
        dtype=getattr(torch, spec.dtype),
        device=device,
        communicator=communicator,
        scheme=scheme,
        plain=plain,
        attention={
            layer: LayerAttention(c.name, c.backend, attention_env(c, spec.block_size, device))
            for c in spec.attention
            for layer in c.layers
        },
        ops={op: provider.build(op, request, settings) for op, (provider, request, settings) in spec.ops.items()},
        experts=spec.experts,
        weights=weights,
        tensors=spec.facts.tensors,
        batch_invariant=bool(spec.config.get("model.batch_invariant")),
        cache_scales={layer: cache_scales_path(layer) for layer in cache_scales(spec, weights).layers},
        max_length=spec.max_model_len,
        named_ops=spec.named_ops,
    )
    builder = LayerBuilder(plan)
    model = spec.architecture.build(spec.model_config, builder)
    drafts = "draft" in spec.architecture.tasks  # what the user said is about the target first
    if spec.quantization.opt_in and not builder.quantized and not drafts:
        raise ConfigError(
            "the method takes none of the model's layers, which would all stay as they are",
            field="quantization",
            value=spec.quantization.name,
            remedy="leave quantization out, or choose a method or options that fit the layers' sizes and names",
        )
    return model.eval()


def weight_map(spec: WorkerSpec) -> WeightMap:
    """Return where the checkpoint's tensors go."""
    weights = spec.architecture.weight_map(spec.model_config, _container(spec))
    method, tensors = spec.quantization, spec.facts.tensors
    return method.shared_tensors(tensors, method.parse(spec.facts.quantization_config)).added_to(weights)


def attention_env(choice: AttentionChoice, block_size: int, device: torch.device) -> AttentionEnv:
    """Return what the backend of a group is built with."""
    return AttentionEnv(choice.request, choice.spec, block_size, device, choice.settings)


def fill_model(spec: WorkerSpec, model: nn.Module, device: torch.device, progress: Progress | None = None) -> None:
    """Fill a model from its checkpoint by the reader that ``load_format`` names; layers are not finalized.

    Raises:
        CheckpointError: the checkpoint does not fit. ConfigError: the reader is not installed.
    """
    if not spec.facts.tensors:
        raise CheckpointError(
            "the model folder has a configuration but no weights",
            field="model.model",
            value=spec.facts.path,
            remedy="add safetensors files, or set load_format to 'dummy' for random weights",
        )
    plain = weight_map(spec)
    weights = _with_cache_scales(plain, cache_scales(spec, plain))
    if spec.load_format in READERS:
        fill_weights(model, open_stream(spec.load_format, spec.facts, device), weights, progress)
        return
    source = ReadAhead(spec.open_tensors(spec.facts), spec.config.get("model.load_threads"))
    fill_weights(model, source, weights, progress)


def cache_scales(spec: WorkerSpec, weights: WeightMap) -> CacheScales:
    """Return the checkpoint's scales of cached keys and values."""
    scheme = spec.quantization.cache_scheme(spec.quantization.parse(spec.facts.quantization_config))
    return find_cache_scales(scheme, spec.facts.tensors, weights)


def _with_cache_scales(weights: WeightMap, scales: CacheScales) -> WeightMap:
    """Return the weight map that knows scales of the cache; of those without use the report speaks."""
    idle = tuple(re.escape(name) for name in scales.idle)
    return replace(weights, rules=(*weights.rules, *scales.rules()), ignore=(*weights.ignore, *idle))


def state_layout(spec: WorkerSpec) -> StateLayout:
    """Return what a rank's parameters depend on."""
    return StateLayout(
        tensor_parallel_size=spec.config.get("parallel.tensor_parallel_size"),
        quantization=spec.quantization.name,
        plain=spec.plain.name,
        dtype=spec.dtype,
        implementation=spec.architecture.name,
    )


def _container(spec: WorkerSpec) -> str:
    return "safetensors" if spec.facts.container == "config" else spec.facts.container
