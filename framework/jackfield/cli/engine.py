"""Starting an engine from the command line."""

from __future__ import annotations

import logging
import sys
from typing import Any


def open_engine(config: Any) -> Any:
    """Return an LLM for ``config``, with progress bars on stderr for downloads and weights.

    Raises:
        JackfieldError: the model or the configuration is at fault.
    """
    from jackfield.cli.output import progress_bars
    from jackfield.config import require_model

    require_model(config)
    logging.basicConfig(stream=sys.stderr, level=config.log.level.upper(), format="%(levelname)s %(name)s: %(message)s")
    with progress_bars() as progress:
        from jackfield.engine.llm import LLM

        return LLM(config=config, progress=progress)
