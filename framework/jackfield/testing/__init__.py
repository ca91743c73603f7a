"""The plugin author's kit: conformance tests for every family, references, and a pytest plugin.

A plugin's tests are one subclass and one fixture::

    import pytest
    from acme_rocket.backend import Rocket
    from jackfield.testing import AttentionConformance


    class TestRocket(AttentionConformance):
        @pytest.fixture
        def plugin(self):
            return Rocket

The names below are imported on first use: they need pytest, and most of them torch and hypothesis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jackfield.testing.attention import AttentionConformance
    from jackfield.testing.common import PluginConformance
    from jackfield.testing.drafters import DrafterConformance
    from jackfield.testing.hooks import HooksConformance
    from jackfield.testing.logits import LogitsProcessorConformance
    from jackfield.testing.models import ModelConformance
    from jackfield.testing.moe import ExpertsConformance
    from jackfield.testing.ops import OpsConformance
    from jackfield.testing.packaging import PackagingConformance
    from jackfield.testing.platforms import PlatformConformance
    from jackfield.testing.quantization import QuantizationConformance
    from jackfield.testing.scheduling import SchedulingConformance

_HOMES = {
    "AttentionConformance": "attention",
    "DrafterConformance": "drafters",
    "ExpertsConformance": "moe",
    "HooksConformance": "hooks",
    "LogitsProcessorConformance": "logits",
    "ModelConformance": "models",
    "OpsConformance": "ops",
    "PackagingConformance": "packaging",
    "PlatformConformance": "platforms",
    "PluginConformance": "common",
    "QuantizationConformance": "quantization",
    "SchedulingConformance": "scheduling",
}

__all__ = [
    "AttentionConformance",
    "DrafterConformance",
    "ExpertsConformance",
    "HooksConformance",
    "LogitsProcessorConformance",
    "ModelConformance",
    "OpsConformance",
    "PackagingConformance",
    "PlatformConformance",
    "PluginConformance",
    "QuantizationConformance",
    "SchedulingConformance",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'jackfield.testing' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"jackfield.testing.{home}"), name)
