"""Reason codes that the registry itself gives. The whole list, with meanings, is docs/reference/reasons.md."""

from __future__ import annotations

DISABLED = "disabled"
DUPLICATE_NAME = "duplicate_name"
LOAD_FAILED = "load_failed"
API_VERSION = "api_version"
MISSING_PACKAGE = "missing_package"
NOT_PRESENT = "not_present"
PROBE_RAISED = "probe_raised"

REGISTRY_CODES = (
    DISABLED,
    DUPLICATE_NAME,
    API_VERSION,
    LOAD_FAILED,
    MISSING_PACKAGE,
    NOT_PRESENT,
    PROBE_RAISED,
)
"""In the order in which they are looked for."""
