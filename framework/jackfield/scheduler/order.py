"""The place of a request in the order that a policy gives."""

from __future__ import annotations

import math

from jackfield.interfaces import RequestView, SchedulingPolicy
from jackfield.protocol import EngineCoreRequest

Key = tuple[float, ...]


def request_view(request: EngineCoreRequest) -> RequestView:
    """Return what a policy may know of a request."""
    return RequestView(
        request.request_id,
        request.arrival,
        request.priority,
        len(request.prompt_token_ids),
        request.max_tokens,
        request.adapter,
        request.sampling_params.extra_args or {},
    )


def sort_key(policy: SchedulingPolicy | None, request: EngineCoreRequest) -> Key:
    """Return the policy's key of a request; without a policy its arrival.

    Raises:
        ValueError: the key is no tuple of numbers.
    """
    if policy is None:
        return (request.arrival,)
    key: object = policy.key(request_view(request))
    if not isinstance(key, tuple) or not all(_is_number(part) for part in key):
        raise ValueError(f"the key of policy '{policy.name}' is {key!r}, not a tuple of numbers")
    return key


def _is_number(part: object) -> bool:
    return isinstance(part, int | float) and not math.isnan(part)
