"""Resolution: all that was decided for one engine, ready to be handed to workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from jackfield.config import EngineConfig
from jackfield.interfaces import (
    AttentionBackend,
    AttentionRequest,
    CacheSpec,
    DeviceFacts,
    Drafter,
    DrafterRequest,
    ExpertsBackend,
    LogitsProcessor,
    ModelArchitecture,
    ModelFacts,
    OpRequest,
    OpsProvider,
    Platform,
    PoolerConfig,
    QuantizationMethod,
    SchedulingPolicy,
    Settings,
    TextConfig,
)
from jackfield.oracle.report import DecisionReport


@dataclass(frozen=True, slots=True)
class AttentionDecision:
    """Who mixes tokens in some like layers.

    Args:
        name: unique in the model. request: of the prefill phase, or of both. prefill, decode: the chosen backends.
        spec: the cache layout that both can work on. settings: the options of the prefill backend.
    """

    name: str
    request: AttentionRequest
    prefill: type[AttentionBackend]
    decode: type[AttentionBackend]
    spec: CacheSpec
    settings: Settings


@dataclass(frozen=True, slots=True)
class OpDecision:
    """Who provides an op, and whether the user ``named`` it."""

    provider: type[OpsProvider]
    request: OpRequest
    settings: Settings
    named: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelDecision:
    """A draft checkpoint and who runs it; fields as in :class:`Resolution`. ``vocabulary`` is the target's id of each
    of its tokens (int32, -1 where there is none), or None where they are the same. ``load_format`` is how it is read.
    """

    facts: ModelFacts
    architecture: type[ModelArchitecture]
    model_config: TextConfig
    dtype: str
    quantization: type[QuantizationMethod]
    plain: type[QuantizationMethod]
    attention: tuple[AttentionDecision, ...]
    experts: type[ExpertsBackend] | None = None
    quantization_settings: Settings = field(default_factory=Settings)
    vocabulary: Any = None
    load_format: str = "auto"


class RecordedRounds(Enum):
    """What of a round of speculation can be recorded: nothing, the verification, or the drafting too."""

    NONE = "not recorded"
    VERIFIED = "recorded up to the verification"
    DRAFTED = "recorded with their drafting"


@dataclass(frozen=True, slots=True)
class DrafterDecision:
    """Who proposes tokens, and by which model, if any. ``rounds``: what of a round of speculation can be recorded."""

    drafter: type[Drafter]
    request: DrafterRequest
    settings: Settings
    model: DraftModelDecision | None = None
    rounds: RecordedRounds = RecordedRounds.NONE


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """Who orders requests."""

    policy: type[SchedulingPolicy]
    settings: Settings


@dataclass(frozen=True, slots=True)
class ProcessorDecision:
    """One active logits processor."""

    processor: type[LogitsProcessor]
    settings: Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """The frozen outcome of the oracle.

    Args:
        config: resolved, with proposals and derived values in it. facts: of the checkpoint. report: how it came about.
        model_config: the architecture's own. plain: runs layers that the checkpoint's method leaves alone.
        quantization_settings: the options of the method.
        processors: active logits processors, in the order in which they are applied. pooler: how hidden states become
            results, or None for an engine that generates.
    """

    config: EngineConfig
    facts: ModelFacts
    platform: type[Platform]
    device: DeviceFacts
    architecture: type[ModelArchitecture]
    model_config: TextConfig
    quantization: type[QuantizationMethod]
    plain: type[QuantizationMethod]
    attention: tuple[AttentionDecision, ...]
    ops: Mapping[str, OpDecision]
    policy: PolicyDecision
    report: DecisionReport
    experts: type[ExpertsBackend] | None = None
    drafter: DrafterDecision | None = None
    processors: tuple[ProcessorDecision, ...] = ()
    pooler: PoolerConfig | None = None
    quantization_settings: Settings = field(default_factory=Settings)
    notes: tuple[str, ...] = field(default=())
