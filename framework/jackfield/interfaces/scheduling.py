"""SchedulingPolicy: in which order requests run. Group ``jackfield.scheduling_policies.v1``.

A policy is an order and nothing else. How steps are planned stays the core's, so no policy can cost overlapped
stepping, chunked prefill or a token of anybody's output.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jackfield.interfaces.plugin import ANY, Plugin, Request, Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingRequest(Request):
    """Asks for the order of requests. The user names the policy."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request. Nothing of it changes while the request lives.

    Args:
        request_id: unique among living requests.
        arrival: counts up from request to request.
        priority: as the caller gave it; smaller is more urgent.
        prompt_length: tokens. max_tokens: most tokens of output.
        adapter: name of a weight adapter, or ``""``.
        extra_args: the request's arguments for plugins.
    """

    request_id: str
    arrival: int
    priority: int
    prompt_length: int
    max_tokens: int
    adapter: str = ""
    extra_args: Mapping[str, Any] = field(default_factory=dict)


class SchedulingPolicy(Plugin):
    """An order of requests: the smallest key is admitted first, the largest is preempted first. Equal keys go in the
    order of arrival.
    """

    family: ClassVar[str] = "scheduling_policies"
    kinds: ClassVar[frozenset[str]] = ANY

    @classmethod
    def build(cls, settings: Settings) -> SchedulingPolicy:
        """Return the policy of one engine."""
        return cls()

    @abstractmethod
    def key(self, request: RequestView) -> tuple[float, ...]:
        """Return the sort key of a request: numbers, none of them NaN. Asked once, when the request comes in; a request
        whose key raises or is malformed ends with an error, and the others go on.
        """
