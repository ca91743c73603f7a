"""Routes of hook plugins: only of plugins that the user named, and never in the place of a route of the core."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute, Match, Route

from jackfield.errors import PluginError
from jackfield.server.engine_view import Engine


def add_plugin_routes(app: FastAPI, engine: Engine, allowed: Iterable[str], core: Iterable[APIRouter]) -> None:
    """Let plugins add routes to ``app``, which has those of ``core`` already.

    Raises:
        ConfigError: a name belongs to no plugin that registers routes.
        PluginError: a plugin's route answers what the core answers, or a plugin added none or removed some.
    """
    own = [*_requests(app.router.routes), *(request for router in core for request in _requests(router.routes))]
    for name in allowed:
        before = list(app.router.routes)
        engine.add_routes(app, (name,))
        if any(route not in app.router.routes for route in before):
            raise _fault(name, "removes routes of the server")
        added = [route for route in app.router.routes if route not in before]
        if not added:
            raise _fault(name, "adds no routes; if it failed, the log says how")
        for method, path in own:
            if any(_answers(route, method, path) for route in added):
                raise _fault(name, f"adds a route for {method} {path}, which the core answers")


def _requests(routes: Iterable[BaseRoute]) -> list[tuple[str, str]]:
    """Return a method and a path that each route answers."""
    plain = [route for route in routes if isinstance(route, Route)]
    return [
        (method, _filled(route.path)) for route in plain for method in sorted(route.methods or ()) if method != "HEAD"
    ]


def _filled(path: str) -> str:
    """Return a path with a word in place of its parameters."""
    return re.sub(r"\{[^}]*\}", "x", path)


def _answers(route: BaseRoute, method: str, path: str) -> bool:
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    return route.matches(scope)[0] is Match.FULL


def _fault(name: str, what: str) -> PluginError:
    return PluginError(
        f"hook plugin '{name}' {what}",
        field="server.allow_routes",
        value=name,
        remedy="take it out of server.allow_routes, or let it use paths of its own",
    )
