"""The layers around the application, plain ASGI all of them: nothing buffers, and a disconnect reaches the inside."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from jackfield.config import ServerSection
from jackfield.server.operations.calls import Listener
from jackfield.server.operations.keys import ApiKeys
from jackfield.server.operations.lifetime import Lifetime, Lifetimes
from jackfield.server.operations.limits import BodyLimit, HeaderLimit
from jackfield.server.operations.observe import ID_HEADER, Observe
from jackfield.server.operations.prometheus import MetricsRoute, ServerMetrics


def wrap(
    app: ASGIApp,
    settings: ServerSection,
    *,
    keys: Sequence[str],
    metrics: ServerMetrics,
    lifetimes: Lifetimes,
    listeners: Sequence[Listener] = (),
) -> ASGIApp:
    """Return ``app`` in its layers. From the outside: request ids and news of calls, CORS, header limit, lifetime, API
    keys, body limit, ``/metrics``.

    Args:
        app: the routes. keys: of which a request needs one, or none. metrics: what ``/metrics`` shows. lifetimes: the
            requests that run. listeners: told of calls that are over.
    """
    app = MetricsRoute(app, metrics)
    app = BodyLimit(app, settings.max_body_bytes)
    if keys:
        app = ApiKeys(app, keys)
    app = Lifetime(app, lifetimes, settings.request_timeout_s)
    app = HeaderLimit(app, settings.max_header_count, settings.max_header_bytes)
    if settings.allowed_origins:
        app = _cors(app, settings)
    return Observe(app, listeners, settings.root_path)


def _cors(app: ASGIApp, settings: ServerSection) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=settings.allowed_origins,
        allow_credentials=settings.allow_credentials,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[ID_HEADER, "retry-after"],
    )
