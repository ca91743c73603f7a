"""Routes are for engines that generate text, or for those that make vectors."""

from __future__ import annotations

from fastapi import Request

from jackfield.errors import RequestError
from jackfield.server.state import state_of


async def generates(request: Request) -> None:
    """Refuse a request for text before an engine that makes vectors.

    Raises:
        RequestError: it does.
    """
    if state_of(request).engine.config.model.task == "pool":
        raise RequestError(
            "the model makes vectors and generates no text",
            field="model",
            value="pool",
            remedy="ask /v1/embeddings, /pooling, /classify, /score or /rerank",
        )


async def pools(request: Request) -> None:
    """Refuse a request for vectors before an engine that generates text.

    Raises:
        RequestError: it does.
    """
    if state_of(request).engine.config.model.task != "pool":
        raise RequestError(
            "the model generates text and makes no vectors",
            field="model",
            value="generate",
            remedy="start a server with --task pool",
        )
