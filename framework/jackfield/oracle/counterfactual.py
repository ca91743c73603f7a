"""Counterfactuals: which value that the user set kept out a plugin of a better band."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from jackfield.errors import NoCandidateError
from jackfield.oracle.verdict import Decision

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """Without the value that the user set for ``field``, plugin ``name`` would have been chosen.

    Args:
        field, value: the setting. place: which decision. name, band: what it excluded. instead: what was chosen, or
            ``""`` when nothing could be.
    """

    field: str
    value: Any
    place: str
    name: str
    band: str
    instead: str = ""

    @property
    def text(self) -> str:
        """``cache.block_size = 8 excluded rocket (BEST)``."""
        return f"{self.field} = {self.value} excluded {self.name} ({self.band})"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data."""
        return asdict(self)


def counterfactuals(
    decide_fn: Callable[[R], Decision],
    request: R,
    user_set: Mapping[str, Any],
    relax: Mapping[str, Callable[[R], R]],
) -> list[Counterfactual]:
    """Decide again without each value that the user set, and report those that cost a band.

    Args:
        decide_fn: decides a request; NoCandidateError counts as worse than any band.
        request: the request with the user's values in it.
        user_set: settings that the user set, with their values.
        relax: for each setting that the request depends on: the request without it.
    """
    actual = _decided(decide_fn, request)
    found = []
    for field, value in user_set.items():
        if field not in relax:
            continue
        relaxed = relax[field](request)
        other = None if relaxed == request else _decided(decide_fn, relaxed)
        if other is not None and (actual is None or other.band > actual.band):
            instead = actual.name if actual else ""
            found.append(Counterfactual(field, value, other.place, other.name, other.band.name, instead))
    return found


def _decided(decide_fn: Callable[[R], Decision], request: R) -> Decision | None:
    try:
        return decide_fn(request)
    except NoCandidateError:
        return None
