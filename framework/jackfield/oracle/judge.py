"""The verdict on one candidate: named stages, all reasons, and no exception of a plugin ever comes out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from jackfield.interfaces import ANY, Band, Plugin, Preference, Reason, Request
from jackfield.oracle.codes import (
    ACCEPTED,
    CHECK,
    CHECK_RAISED,
    DEVICE,
    DTYPE,
    ENVIRONMENT,
    EXCLUDED,
    FEATURE,
    KIND,
    OPT_IN,
    PREFERENCE,
    PREFERENCE_RAISED,
)
from jackfield.oracle.verdict import Verdict
from jackfield.registry import PluginRef
from jackfield.registry.codes import NOT_PRESENT, PROBE_RAISED

Extra = Callable[[Any, Any], Sequence[Reason]]
"""Checks of the environment by the caller of a decision: (plugin class, request) to reasons. May raise: the plugin is
then rejected with ``probe_raised``.
"""

T = TypeVar("T")

_logger = logging.getLogger("jackfield.oracle")


def judge(
    ref: PluginRef, request: Request, excluded_by: str = "", extra: Extra | None = None, *, opt_in_by: str = ""
) -> Verdict:
    """Return the verdict on ``ref``.

    Args:
        excluded_by: the setting that excludes it, or ``""``. opt_in_by: the setting to name it in, or ``""`` when it
            was named.
    """
    if excluded_by:
        reason = Reason(EXCLUDED, excluded_by, f"{excluded_by} names it", f"remove '{ref.name}' from {excluded_by}")
        return Verdict.of(ref, EXCLUDED, (reason,))
    plugin = ref.load()
    if plugin is None:
        reason = ref.reason()
        return Verdict.of(ref, reason.code, (reason,))
    reasons = (*ref.missing(), *_unasked(plugin, opt_in_by), *set_reasons(plugin, request))
    if reasons:
        return Verdict.of(ref, reasons[0].code, reasons)
    return _ask(ref, plugin, request, extra)


def _unasked(plugin: type[Plugin], setting: str) -> tuple[Reason, ...]:
    if not plugin.opt_in or not setting:
        return ()
    return (Reason(OPT_IN, setting, "is used only when it is named", f"set {setting} to '{plugin.name}'"),)


def probe_reasons(platform: Any, request: Any) -> Sequence[Reason]:
    """The ``extra`` of platform decisions: a reason when the platform is not present."""
    probe = platform.probe()
    return () if probe.present else (Reason(NOT_PRESENT, "probe", probe.detail),)


def set_reasons(plugin: type[Plugin], request: Request) -> tuple[Reason, ...]:
    """Return all reasons that follow from comparing sets: device, dtype, kind, and one for each missing feature."""
    reasons = []
    if request.device is not None and not _has(plugin.device_types, request.device.type):
        reasons.append(_not_among(DEVICE, "device.type", request.device.type, plugin.device_types))
    if request.dtype and not _has(plugin.dtypes, request.dtype):
        reasons.append(_not_among(DTYPE, "dtype", request.dtype, plugin.dtypes))
    if not _has(plugin.kinds, request.kind):
        reasons.append(_not_among(KIND, "kind", request.kind, plugin.kinds))
    for feature in sorted(request.needs - plugin.features):
        reasons.append(Reason(FEATURE, "needs", f"does not declare the feature '{feature}'"))
    return tuple(reasons)


def _ask(ref: PluginRef, plugin: type[Plugin], request: Request, extra: Extra | None) -> Verdict:
    stages: list[tuple[str, str, Extra]] = [(CHECK, CHECK_RAISED, lambda found, asked: _checked(found.check(asked)))]
    if extra is not None:
        stages.append((ENVIRONMENT, PROBE_RAISED, lambda found, asked: _checked(extra(found, asked))))
    for stage, code, call in stages:
        answer = _guarded(ref, stage, code, partial(call, plugin, request))
        if reasons := (answer,) if isinstance(answer, Reason) else tuple(answer):
            return Verdict.of(ref, stage, reasons)
    wish = _guarded(ref, PREFERENCE, PREFERENCE_RAISED, lambda: _checked_preference(plugin.preference(request)))
    if isinstance(wish, Reason):
        return Verdict.of(ref, PREFERENCE, (wish,))
    return Verdict.of(ref, ACCEPTED, (), wish)


def _guarded(ref: PluginRef, stage: str, code: str, call: Callable[[], T]) -> T | Reason:
    try:
        return call()
    except Exception as error:
        if ref.record_fault(error, code, stage):
            _logger.warning("plugin %s (%s): %s", ref.name, ref.owner, code, exc_info=error)
        return Reason(code, stage, f"{type(error).__name__}: {error}", f"report it to the owner, {ref.owner}")


def _checked(reasons: Iterable[object]) -> tuple[Reason, ...]:
    found = tuple(reasons)
    good = tuple(reason for reason in found if isinstance(reason, Reason))
    if len(good) < len(found):
        raise TypeError(f"{found!r} holds something that is not a Reason")
    return good


def _checked_preference(found: object) -> Preference:
    if not isinstance(found, Preference) or not isinstance(found.band, Band):
        raise TypeError(f"{found!r} is not a Preference with a Band")
    if found.score is not None and math.isnan(found.score):
        raise ValueError("the score is not a number")
    return found


def _has(declared: frozenset[str], value: str) -> bool:
    return value in declared or declared >= ANY


def _not_among(code: str, fact: str, value: str, declared: frozenset[str]) -> Reason:
    names = ", ".join(sorted(f"'{name}'" for name in declared)) or "nothing"
    return Reason(code, fact, f"'{value}' is not among {names}")
