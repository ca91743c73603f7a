"""Configuration: one schema for files, variables, flags and arguments; frozen, with the origin of every value."""

from jackfield.config.checks import require_model
from jackfield.config.engine import FAMILY_FIELDS, EngineConfig
from jackfield.config.load import load_config
from jackfield.config.origin import Origin
from jackfield.config.plugins import PluginSettings
from jackfield.config.proposals import AppliedProposal
from jackfield.config.reference import Row, show
from jackfield.config.sections import (
    CacheSection,
    LogSection,
    ModelSection,
    ParallelSection,
    SchedulerSection,
    ServerSection,
    SpeculativeSection,
)
from jackfield.config.selection import ResolvedSelection, Selection

__all__ = [
    "FAMILY_FIELDS",
    "AppliedProposal",
    "CacheSection",
    "EngineConfig",
    "LogSection",
    "ModelSection",
    "Origin",
    "ParallelSection",
    "PluginSettings",
    "ResolvedSelection",
    "Row",
    "SchedulerSection",
    "Selection",
    "ServerSection",
    "SpeculativeSection",
    "load_config",
    "require_model",
    "show",
]
