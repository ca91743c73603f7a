"""``/v1/models``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from jackfield.server.openai.answers import ErrorAnswer, ModelCard, ModelList
from jackfield.server.state import ServerState, state_of

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """List the names under which the model is served."""
    state = state_of(request)
    return ModelList(data=[_card(state, name) for name in state.names])


@router.get("/v1/models/{name:path}", responses={404: {"model": ErrorAnswer}})
async def get_model(name: str, request: Request) -> ModelCard:
    """Show one model."""
    state = state_of(request)
    return _card(state, state.check_model(name))


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=int(state.started),
        root=state.config.model.model,
        max_model_len=state.engine.max_model_len,
    )
