"""Broadcast events: every listener hears them. Group ``jackfield.hooks``; implementations are marked with
:data:`hookimpl`.

A listener may take any subset of an event's arguments. One that raises is logged with its owner and switched off.
"""

from __future__ import annotations

from typing import Any

import pluggy

hookspec = pluggy.HookspecMarker("jackfield")
hookimpl = pluggy.HookimplMarker("jackfield")


class Hooks:
    """The events."""

    @hookspec
    def engine_config_resolved(self, config: Any) -> None:
        """The configuration is resolved and frozen."""

    @hookspec
    def decision_made(self, decision: Any) -> None:
        """The oracle decided one request."""

    @hookspec
    def engine_started(self, engine: Any) -> None:
        """The engine is ready for requests."""

    @hookspec
    def engine_stopping(self, engine: Any) -> None:
        """The engine is about to stop."""

    @hookspec
    def step_finished(self, stats: Any) -> None:
        """A step was scheduled, executed and accounted."""

    @hookspec
    def request_finished(self, request_id: str, finish_reason: str, stats: Any) -> None:
        """A request ended."""

    @hookspec
    def kv_events(self, events: Any) -> None:
        """The prefixes that the KV cache holds changed in a step. Told only with ``cache.kv_events``."""

    @hookspec
    def register_commands(self, app: Any) -> None:
        """The command line is being built: add sub-commands to ``app``."""

    @hookspec
    def register_routes(self, app: Any) -> None:
        """The server is being built: add routes. Called only for plugins that the user allowed by name."""
