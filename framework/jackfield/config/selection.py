"""What a user says about the choice among plugins: force, prefer, exclude; for everything, or for a part of the
engine.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from pydantic import Field

from jackfield.config.base import Section


class Selection(Section):
    """The user's word on one choice.

    ``force`` is used or is an error; ``prefer`` is tried in order and may fall back; ``exclude`` is never used.
    Nested maps narrow it; the most specific
    ``force`` and ``prefer`` win, ``exclude`` adds up. From least to most specific: phases, kinds, layers, components.
    """

    force: str | None = None
    """Use this plugin or fail."""
    prefer: tuple[str, ...] = ()
    """Try these first, in this order."""
    exclude: tuple[str, ...] = ()
    """Never use these."""
    phases: dict[str, Selection] = Field(default_factory=dict)
    """By phase: ``prefill``, ``decode``."""
    kinds: dict[str, Selection] = Field(default_factory=dict)
    """By kind: a layer kind such as ``sliding``, or the name of an op."""
    layers: dict[str, Selection] = Field(default_factory=dict)
    """By layer: an index (``"3"``), a range (``"0-7"``, both ends included) or a pattern on the module path
    (``"*.attn"``).
    """
    components: dict[str, Selection] = Field(default_factory=dict)
    """By component: ``target``, ``drafter``, ``encoder``."""

    def resolve(
        self, *, component: str = "target", kind: str = "", phase: str = "", layer: int | None = None, path: str = ""
    ) -> ResolvedSelection:
        """Return what holds for one choice, with the dotted path of the entry each word came from."""
        word = ResolvedSelection()
        self._apply(word, "", component=component, kind=kind, phase=phase, layer=layer, path=path)
        return word

    def _apply(
        self, word: ResolvedSelection, at: str, *, component: str, kind: str, phase: str, layer: int | None, path: str
    ) -> None:
        if self.force is not None:
            word.force, word.force_from = self.force, f"{at}force"
        if self.prefer:
            word.prefer, word.prefer_from = self.prefer, f"{at}prefer"
        if self.exclude:
            word.exclude = tuple(dict.fromkeys((*word.exclude, *self.exclude)))
            word.exclude_from = f"{at}exclude"
        narrower = (
            [(f"phases.{phase}", self.phases[phase])] if phase in self.phases else [],
            [(f"kinds.{kind}", self.kinds[kind])] if kind in self.kinds else [],
            [(f"layers.{key}", part) for key, part in self.layers.items() if layer_matches(key, layer, path)],
            [(f"components.{component}", self.components[component])] if component in self.components else [],
        )
        for name, part in (entry for entries in narrower for entry in entries):
            part._apply(word, f"{at}{name}.", component=component, kind=kind, phase=phase, layer=layer, path=path)


@dataclass(slots=True)
class ResolvedSelection:
    """What holds for one choice; the ``*_from`` fields are paths below the family's section, such as
    ``kinds.sliding.force``.
    """

    force: str | None = None
    prefer: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    force_from: str = ""
    prefer_from: str = ""
    exclude_from: str = ""


def layer_matches(key: str, layer: int | None, path: str) -> bool:
    """Return whether a word about layers (a number, a range, a pattern of paths) is about this one."""
    if layer is not None and key.isdecimal():
        return int(key) == layer
    first, dash, last = key.partition("-")
    if layer is not None and dash and first.isdecimal() and last.isdecimal():
        return int(first) <= layer <= int(last)
    return bool(path) and fnmatch.fnmatchcase(path, key)
