"""Which values of ``model.load_format`` read which containers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jackfield.checkpoint.sharded_state import is_sharded_state
from jackfield.interfaces.facts import ModelFacts

EVERY = ("safetensors", "pytorch", "gguf", "config", "sharded_state")
LOAD_FORMATS: Mapping[str, tuple[str, ...]] = {
    "auto": EVERY,
    "dummy": EVERY,
    "safetensors": ("safetensors",),
    "fastsafetensors": ("safetensors",),
    "runai_streamer": ("safetensors",),
    "pytorch": ("pytorch",),
    "gguf": ("gguf",),
    "sharded_state": ("sharded_state",),
}


def containers_of(load_format: str) -> tuple[str, ...]:
    """Return the containers that a load format reads."""
    return LOAD_FORMATS[load_format]


def format_of(facts: ModelFacts) -> str:
    """Return what a checkpoint is stored in: its container, or ``sharded_state``."""
    return "sharded_state" if is_sharded_state(Path(facts.path)) else facts.container


def reads(load_format: str, facts: ModelFacts) -> bool:
    """Return whether a load format reads the checkpoint."""
    return format_of(facts) in containers_of(load_format)
