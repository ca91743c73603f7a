"""Limits that every backend has: of layouts, and of activations that make no sense."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.interfaces import ExpertsRequest, Reason

UNITS = {"int4": 2, "mxfp4": 32}
"""Inputs that a layout packs or scales together."""

TWO = frozenset({"swiglu_oai", "swiglu_step", "situ"})
"""Activations that are nothing without a gate."""


def shared_limits(request: ExpertsRequest) -> Iterator[Reason]:
    """Return what no backend can compute."""
    if request.activation in TWO and not request.gated:
        yield Reason("activation", "gated", f"{request.activation} multiplies two projections")
    unit = UNITS.get(request.kind, 1)
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(request, name)
        if size % unit:
            yield Reason(name, name, f"{size} is no multiple of {unit}, in which {request.kind} packs numbers")


def unknown_activation(request: ExpertsRequest, known: frozenset[str]) -> Iterator[Reason]:
    """Return a reason where the activation is none of these."""
    if request.activation not in known:
        yield Reason("activation", "activation", f"'{request.activation}' is not one of {', '.join(sorted(known))}")
