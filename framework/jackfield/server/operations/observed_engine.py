"""An engine that tells the current call what its requests asked for and got."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from jackfield.engine.input_processor import Prompt
from jackfield.engine.outputs import RequestOutput
from jackfield.protocol import SamplingParams
from jackfield.server.engine_view import Engine
from jackfield.server.operations.calls import Generation, current_call


def observed(engine: Engine) -> Engine:
    """Return ``engine``, with every request of :meth:`Engine.generate` noted in the call that makes it."""
    return cast(Engine, _Observed(engine))


class _Observed:
    """Passes everything on to an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        params = sampling_params or self._engine.default_sampling_params()
        generation = Generation.of(params)
        call = current_call.get()
        if call is not None:
            call.generations.append(generation)
        outputs = cast(
            AsyncGenerator[RequestOutput, None], self._engine.generate(prompt, params, request_id, **options)
        )
        # Closed at once when this one is, so that a request whose client left ends at once.
        async with aclosing(outputs):
            async for output in outputs:
                generation.note(output)
                yield output
