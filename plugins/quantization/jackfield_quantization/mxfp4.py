"""``mxfp4``: gpt-oss checkpoints, whose experts are in OCP's microscaling format of four bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jackfield.interfaces import LayerInfo, LinearScheme, Preference, QuantizationRequest
from jackfield_quantization.matching import named, names_in
from jackfield_quantization.stored_method import StoredMethod

BLOCKS, SCALES = "blocks", "scales"


@dataclass(frozen=True, slots=True)
class Mxfp4Spec:
    """Modules that are plain."""

    ignored: tuple[str, ...] = ()


class Mxfp4(StoredMethod):
    """Experts kept in ``mxfp4``; everything else is plain."""

    name: ClassVar[str] = "mxfp4"
    summary: ClassVar[str] = "gpt-oss experts, kept in mxfp4"
    kinds: ClassVar[frozenset[str]] = frozenset({"mxfp4", "gpt_oss_mxfp4"})

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return the plain preference: nothing is expanded."""
        return Preference(why="experts stay packed")

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> Mxfp4Spec:
        """Return the spec.

        Raises:
            ConfigError: a value is not known.
        """
        return Mxfp4Spec(names_in(config, "modules_to_not_convert"))

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Mxfp4Spec) -> LinearScheme | None:
        """Return the scheme of experts; None for all else."""
        known = [facts for facts in info.tensors.values() if facts]
        packed = any(BLOCKS in facts for facts in known) if known else True
        if info.role != "experts" or not packed or any(named(s, spec.ignored) for s in info.sources.values()):
            return None
        from jackfield_quantization.mxfp4_experts import Mxfp4Experts

        return Mxfp4Experts()

    @classmethod
    def experts_layout(cls, spec: Any) -> str:
        """Return the layout of experts."""
        return "mxfp4"
