"""``jackfield serve``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags


def serve(model: str | None = None, *, engine: Annotated[EngineFlags, Parameter(parse=False)]) -> int:
    """Serve a model over HTTP, for OpenAI and Anthropic clients.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME; the one of the configuration file when not given.
    """
    from jackfield.config import require_model
    from jackfield.errors import ConfigError

    config = engine.config(model)
    require_model(config)
    try:
        from jackfield.server.operations.run import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jackfield"):
            raise
        raise ConfigError(
            f"the server needs the package '{error.name}', which is not installed",
            field="serve",
            value=error.name,
            remedy="pip install 'jackfield[serve]'",
        ) from error
    return int(run(config) or 0)
