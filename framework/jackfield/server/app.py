"""The server as an ASGI application."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI

from jackfield import __version__
from jackfield.config import EngineConfig
from jackfield.server import errors
from jackfield.server.anthropic.messages import router as messages_router
from jackfield.server.chat import check_template
from jackfield.server.engine_view import Engine
from jackfield.server.openai.chat import router as chat_router
from jackfield.server.openai.completions import router as completions_router
from jackfield.server.openai.models import router as models_router
from jackfield.server.openai.status import router as status_router
from jackfield.server.openai.tokenize import router as tokenize_router
from jackfield.server.page.routes import router as page_router
from jackfield.server.plugin_routes import add_plugin_routes
from jackfield.server.pooling.routes import router as pooling_router
from jackfield.server.pooling.task import generates, pools
from jackfield.server.responses.routes import router as responses_router
from jackfield.server.responses.store import make_store
from jackfield.server.state import make_state

GENERATING: tuple[APIRouter, ...] = (chat_router, completions_router, responses_router, messages_router)
"""Routes of engines that generate text."""
POOLING: tuple[APIRouter, ...] = (pooling_router,)
"""Routes of engines that make vectors."""
ROUTERS: tuple[APIRouter, ...] = (*GENERATING, *POOLING, models_router, tokenize_router, status_router, page_router)
"""All routes of the core. Another API is one more line here."""


def build_app(engine: Engine, config: EngineConfig) -> FastAPI:
    """Return the application that serves ``engine``.

    Raises:
        ConfigError: the chat template cannot be read, or ``server.allow_routes`` names an unknown plugin.
        PluginError: a plugin's route would hide one of the core.
    """
    app = FastAPI(title="Jackfield", version=__version__, root_path=config.server.root_path)
    app.state.jackfield = make_state(engine, config)
    app.state.responses = make_store(config.server)
    errors.install(app)
    for router in ROUTERS:
        needs = [generates] if router in GENERATING else [pools] if router in POOLING else []
        app.include_router(router, dependencies=[Depends(need) for need in needs])
    add_plugin_routes(app, engine, config.server.allow_routes, ROUTERS)
    check_template(app.state.jackfield)
    return app
