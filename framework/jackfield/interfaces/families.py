"""The families, as data: what the registry discovers and the oracle decides."""

from __future__ import annotations

from dataclasses import dataclass

from jackfield.interfaces.attention import AttentionBackend
from jackfield.interfaces.drafters import Drafter
from jackfield.interfaces.logits import LogitsProcessor
from jackfield.interfaces.models import ModelArchitecture
from jackfield.interfaces.moe import ExpertsBackend
from jackfield.interfaces.ops import OpsProvider
from jackfield.interfaces.platform import Platform
from jackfield.interfaces.plugin import Plugin
from jackfield.interfaces.quantization import QuantizationMethod
from jackfield.interfaces.scheduling import SchedulingPolicy


@dataclass(frozen=True, slots=True)
class Family:
    """One extension point.

    Args:
        name: plural noun used in reports and configuration paths.
        base: the class that plugins subclass.
        version: (major, minor) of the interface this core offers. Plugins with the same major and a minor up to this
            one are accepted.
    """

    name: str
    base: type[Plugin]
    version: tuple[int, int] = (1, 0)

    @property
    def group(self) -> str:
        """Entry-point group, with the major version in it."""
        return f"jackfield.{self.name}.v{self.version[0]}"


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("platforms", Platform),
        Family("models", ModelArchitecture, (1, 6)),
        Family("quantization_methods", QuantizationMethod, (1, 7)),
        Family("moe_experts", ExpertsBackend, (1, 2)),
        Family("attention_backends", AttentionBackend, (1, 3)),
        Family("ops", OpsProvider, (1, 3)),
        Family("drafters", Drafter, (1, 4)),
        Family("scheduling_policies", SchedulingPolicy),
        Family("logits_processors", LogitsProcessor),
    )
}
"""In the order in which the oracle decides them."""

HOOK_GROUP = "jackfield.hooks"
