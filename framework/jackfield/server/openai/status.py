"""Routes about the server itself: health, load, version, and what the oracle decided."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from jackfield import __version__
from jackfield.server.openai.answers import ErrorAnswer, Load, Status, Version
from jackfield.server.state import state_of

router = APIRouter(tags=["Server"])


@router.get("/health", responses={503: {"model": Status}})
async def health(request: Request, response: Response) -> Status:
    """Tell whether the engine lives."""
    if state_of(request).engine.is_running:
        return Status(status="ok")
    response.status_code = 503
    return Status(status="dead")


@router.get("/ready", responses={503: {"model": Status}})
async def ready(request: Request, response: Response) -> Status:
    """Tell whether new requests are taken."""
    state = state_of(request)
    if state.engine.is_running and not state.draining:
        return Status(status="ok")
    response.status_code = 503
    return Status(status="draining" if state.engine.is_running else "dead")


@router.get("/version")
async def version() -> Version:
    """Tell the version."""
    return Version(version=__version__)


@router.get("/load")
async def load(request: Request) -> Load:
    """Tell how many requests there are."""
    now = state_of(request).engine.metrics()
    return Load(server_load=now.running + now.waiting, running=now.running, waiting=now.waiting)


@router.get("/server/decisions", responses={404: {"model": ErrorAnswer}})
async def decisions(request: Request) -> dict[str, Any]:
    """Show which plugins were chosen, and why; off unless `server.expose_decisions` is set."""
    state = state_of(request)
    if not state.settings.expose_decisions:
        raise HTTPException(404, "decisions are not shown; start the server with --expose-decisions")
    report: dict[str, Any] = state.engine.report.to_dict()
    return report
