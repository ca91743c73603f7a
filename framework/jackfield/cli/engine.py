"""Starting an engine from the command line."""

from __future__ import annotations

from typing import Any


def open_engine(config: Any) -> Any:
    """Return an LLM for ``config``, with a note on stderr while it starts.

    Raises:
        JackfieldError: the model or the configuration is at fault.
    """
    from rich.console import Console

    from jackfield.config import require_model

    model = require_model(config)
    console = Console(stderr=True)
    with console.status(f"loading {model}"):
        from jackfield.engine.llm import LLM

        return LLM(config=config)
