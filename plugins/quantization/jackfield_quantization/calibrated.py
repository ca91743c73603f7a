"""Methods that write checkpoints whose numbers are chosen for what layers are given when the model reads a text. No
torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jackfield.errors import ConfigError
from jackfield.interfaces import Exporter, LayerInfo, LinearScheme, Option, Settings
from jackfield_quantization.online import OnlineMethod, OnlineSpec

WORD = 32
"""Bits of a packed word."""


@dataclass(frozen=True, slots=True)
class CalibratedPlan(OnlineSpec):
    """How to round in groups.

    Args:
        bits: of a number. group: inputs that share a scale, 0 for all. symmetric: no zero points.
    """

    bits: int = 4
    group: int = 128
    symmetric: bool = True

    def whole_groups(self, inputs: int) -> bool:
        """Return whether inputs are whole groups."""
        return inputs % (self.group or 1) == 0

    def whole_words(self, outputs: int, inputs: int) -> bool:
        """Return whether what is packed fills words."""
        numbers = WORD // self.bits
        return inputs % numbers == 0 and outputs % numbers == 0


@dataclass(frozen=True, slots=True)
class GptqPlan(CalibratedPlan):
    """How to quantize as GPTQ.

    Args:
        reordered: in the order of what inputs contribute. damping: share of the mean moment that is added to each.
    """

    reordered: bool = False
    damping: float = 0.01


@dataclass(frozen=True, slots=True)
class AwqPlan(CalibratedPlan):
    """How to quantize as AWQ.

    Args:
        clip: whether ends of a group's span may be cut off.
    """

    symmetric: bool = False
    clip: bool = True

    def whole_words(self, outputs: int, inputs: int) -> bool:
        """See CalibratedPlan: words run along the outputs."""
        return outputs % (WORD // self.bits) == 0


class CalibratedMethod(OnlineMethod):
    """Base. Embedding, output projection, experts, and layers that are no whole groups and words stay as they are."""

    options: ClassVar[Mapping[str, Option]] = {
        **OnlineMethod.options,
        "group_size": Option(int, 128, "inputs that share a scale; 0 for all"),
    }

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> CalibratedPlan:
        """Return the plan without any options."""
        return cls.plan(OnlineSpec(), {name: option.default for name, option in cls.options.items()})

    @classmethod
    def configure(cls, spec: OnlineSpec, settings: Settings) -> CalibratedPlan:
        """Return the plan for the layers that the user means.

        Raises:
            ConfigError: an option has a value that no checkpoint can have.
        """
        values = {name: settings.values.get(name, option.default) for name, option in cls.options.items()}
        cls.demand("group_size", values, values["group_size"] >= 0, "a group of 0 stands for all inputs")
        return cls.plan(super().configure(spec, settings), values)

    @classmethod
    @abstractmethod
    def plan(cls, taken: OnlineSpec, values: Mapping[str, Any]) -> CalibratedPlan:
        """Return the plan with these options.

        Args:
            taken: the layers that the user means. values: of all options.
        """

    @classmethod
    def demand(cls, name: str, values: Mapping[str, Any], fits: bool, remedy: str) -> None:
        """Refuse the value of an option.

        Raises:
            ConfigError: it does not fit.
        """
        if not fits:
            raise ConfigError(
                f"{name} has no sense",
                field=f"plugins.options.{cls.name}.{name}",
                value=values[name],
                remedy=remedy,
            )

    @classmethod
    def scheme(cls, info: LayerInfo, spec: OnlineSpec | None) -> LinearScheme | None:
        """See OnlineMethod."""
        plan = spec if isinstance(spec, CalibratedPlan) else cls.parse({})
        words = all(plan.whole_words(shard.size, info.input_size) for shard in info.shards)
        found = super().scheme(info, spec) if info.role == "linear" and words else None
        if found is None or plan.whole_groups(info.input_size):
            return found
        return cls.cut_groups(info, plan)

    @classmethod
    def cut_groups(cls, info: LayerInfo, plan: CalibratedPlan) -> LinearScheme | None:
        """Return what becomes of a layer whose inputs are no whole groups: it stays as it is."""
        return None

    @classmethod
    def converted(cls, info: LayerInfo) -> LinearScheme | None:
        """Return a scheme that says no more than that the layer is one to write."""
        from jackfield_quantization.rounding import UnwrittenScheme

        return UnwrittenScheme(cls.name, cls.writes)


class CalibratedGptq(CalibratedMethod):
    """Writes GPTQ checkpoints (arXiv:2210.17323): the error of each number is made up for by those that follow."""

    name: ClassVar[str] = "calibrated_gptq"
    summary: ClassVar[str] = "writes GPTQ checkpoints of dense ones: jackfield quantize --format gptq --text FILE"
    writes: ClassVar[str] = "gptq"
    options: ClassVar[Mapping[str, Option]] = {
        **CalibratedMethod.options,
        "bits": Option(int, 4, "of a number", (2, 4, 8)),
        "desc_act": Option(bool, False, "quantize inputs in the order of what they contribute"),
        "symmetric": Option(bool, True, "no zero points"),
        "damping": Option(float, 0.01, "share of the mean moment that is added to each"),
    }

    @classmethod
    def plan(cls, taken: OnlineSpec, values: Mapping[str, Any]) -> GptqPlan:
        """See CalibratedMethod."""
        cls.demand("damping", values, 0 < values["damping"] < 1, "use a share such as 0.01")
        return GptqPlan(
            taken.ignore,
            taken.only,
            bits=values["bits"],
            group=values["group_size"],
            symmetric=values["symmetric"],
            reordered=values["desc_act"],
            damping=values["damping"],
        )

    @classmethod
    def exporter(cls, spec: Any) -> Exporter | None:
        """Return what writes GPTQ checkpoints."""
        from jackfield_quantization.gptq_export import GptqExporter

        return GptqExporter(spec)


class CalibratedAwq(CalibratedMethod):
    """Writes AWQ checkpoints (arXiv:2306.00978): inputs that are large are multiplied up before numbers are rounded,
    and what comes before them is divided.
    """

    name: ClassVar[str] = "calibrated_awq"
    summary: ClassVar[str] = "writes AWQ checkpoints of dense ones: jackfield quantize --format awq --text FILE"
    writes: ClassVar[str] = "awq"
    api: ClassVar[tuple[int, int]] = (1, 5)
    options: ClassVar[Mapping[str, Option]] = {
        **CalibratedMethod.options,
        "bits": Option(int, 4, "of a number; the format has no other", (4,)),
        "clip": Option(bool, True, "cut off ends of a group's span where that makes products nearer"),
    }

    @classmethod
    def plan(cls, taken: OnlineSpec, values: Mapping[str, Any]) -> AwqPlan:
        """See CalibratedMethod."""
        return AwqPlan(taken.ignore, taken.only, group=values["group_size"], clip=values["clip"])

    @classmethod
    def cut_groups(cls, info: LayerInfo, plan: CalibratedPlan) -> LinearScheme | None:
        """Refuse the group: engines that run AWQ take every layer in whole groups.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"the {info.input_size} inputs of {info.name} are no whole groups",
            field=f"plugins.options.{cls.name}.group_size",
            value=plan.group,
            remedy="use a group that divides them, such as 64 or 32, or leave the layer out with the option ignore",
        )

    @classmethod
    def exporter(cls, spec: Any) -> Exporter | None:
        """Return what writes AWQ checkpoints."""
        from jackfield_quantization.awq_export import AwqExporter

        return AwqExporter(spec)
