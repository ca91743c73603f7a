"""All reason codes of the core, and the stages at which a candidate can be rejected.

Plugins add codes of their own in ``check()``; docs/reference/reasons.md describes the core's.
"""

from __future__ import annotations

from jackfield.registry.codes import REGISTRY_CODES

EXCLUDED = "excluded"
OPT_IN = "opt_in"
DEVICE = "device"
DTYPE = "dtype"
KIND = "kind"
FEATURE = "feature"
CHECK_RAISED = "check_raised"
PREFERENCE_RAISED = "preference_raised"

TASK = "task"
NO_CACHE_LAYOUT = "no_cache_layout"
BLOCK_SIZE = "block_size"
NEED = "need"

ENVIRONMENT_CODES = (TASK, NO_CACHE_LAYOUT, BLOCK_SIZE, NEED)
"""Given by the pipeline's own checks around a candidate."""

REASON_CODES: tuple[str, ...] = (
    EXCLUDED,
    *REGISTRY_CODES,
    OPT_IN,
    DEVICE,
    DTYPE,
    KIND,
    FEATURE,
    *ENVIRONMENT_CODES,
    CHECK_RAISED,
    PREFERENCE_RAISED,
)
"""Every code that the core itself gives."""

CHECK = "check"
ENVIRONMENT = "environment"
PREFERENCE = "preference"
ACCEPTED = "accepted"

STAGES: tuple[str, ...] = (
    EXCLUDED,
    "disabled",
    "duplicate_name",
    "api_version",
    "load_failed",
    "missing_package",
    OPT_IN,
    DEVICE,
    DTYPE,
    KIND,
    FEATURE,
    CHECK,
    ENVIRONMENT,
    PREFERENCE,
    ACCEPTED,
)
"""How far a candidate came, in order. ``environment`` is what the caller of the decision checks (a platform's probe,
common cache layouts).
"""
