"""The whole configuration as one tree of sections."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jackfield.config.base import Section
from jackfield.config.plugins import PluginSettings
from jackfield.config.sections import (
    CacheSection,
    LogSection,
    ModelSection,
    ParallelSection,
    SamplingSection,
    SchedulerSection,
    ServerSection,
    SpeculativeSection,
)
from jackfield.config.selection import Selection


class ConfigTree(Section):
    """All settings of an engine."""

    model: ModelSection = ModelSection()
    """Which model, and how it is read."""
    platform: Selection = Selection()
    """Choice of the platform."""
    attention: Selection = Selection()
    """Choice of attention backends, per layer kind, phase, layer and component."""
    quantization: Selection = Selection()
    """Choice of the quantization method."""
    moe: Selection = Selection()
    """Choice of expert kernels."""
    ops: Selection = Selection()
    """Choice of op providers; kinds are names of ops."""
    cache: CacheSection = CacheSection()
    """The KV cache."""
    scheduler: SchedulerSection = SchedulerSection()
    """What runs in a step."""
    parallel: ParallelSection = ParallelSection()
    """How many devices share a model."""
    speculative: SpeculativeSection = SpeculativeSection()
    """Speculative decoding."""
    sampling: SamplingSection = SamplingSection()
    """How tokens are chosen, for all requests."""
    generation: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters that replace the model's own defaults (`temperature`, `top_p`, ...)."""
    server: ServerSection = ServerSection()
    """The HTTP server. None of it changes what the engine computes."""
    log: LogSection = LogSection()
    """What the engine tells about itself."""
    plugins: PluginSettings = PluginSettings()
    """Which plugins may take part, and their options."""
