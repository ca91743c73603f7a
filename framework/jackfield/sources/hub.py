"""Models on the Hugging Face hub, kept in its own cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jackfield.errors import ConfigError, ModelNotFoundError
from jackfield.sources.files import FOLDER_SUFFIXES
from jackfield.sources.progress import Progress

WANTED = (*(f"*{suffix}" for suffix in FOLDER_SUFFIXES), "[0-9]*_*/pytorch_model.bin")
PYTORCH = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""Weights of models that have no safetensors."""
UNWANTED = ("consolidated*", "*/*/*", "[!0-9]*/*", "[0-9][!0-9_]*/*")
"""Second copies of the weights, and sub-folders, which hold exports for other programs, but for further modules."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_REVISION = re.compile(r"[\w./-]+")


def is_repository(spec: str) -> bool:
    """Return whether ``spec`` has the form ORG/NAME, perhaps with @REVISION."""
    repository, at, revision = spec.partition("@")
    return bool(_REPOSITORY.fullmatch(repository)) and (not at or bool(_REVISION.fullmatch(revision)))


def hub_model(spec: str, progress: Progress | None = None) -> Path:
    """Return the folder of a model of the hub, downloaded unless it is in the hub's cache already.

    Args:
        spec: ``ORG/NAME`` or ``ORG/NAME@REVISION``.
        progress: told of bytes downloaded.

    Raises:
        ConfigError: ``spec`` has another form.
        ModelNotFoundError: the hub has no such model or cannot be reached, and the cache does not hold it.
    """
    if not is_repository(spec):
        raise ConfigError(
            "this is no model of the hub", field="model", value=f"hf:{spec}", remedy="write hf:ORG/NAME[@REVISION]"
        )
    try:
        return _snapshot(spec, progress, local=False)
    except Exception as error:  # the hub's client raises errors of several libraries
        return _from_cache(spec, error)


def _from_cache(spec: str, cause: Exception) -> Path:
    try:
        return _snapshot(spec, None, local=True)
    except Exception:  # not in the cache: the first error is the one to tell
        raise ModelNotFoundError(
            f"the hub did not give this model: {_first_line(cause)}",
            field="model",
            value=spec,
            remedy="check the name, the network, and HF_TOKEN for models that need a login; or name a local path",
        ) from cause


def _snapshot(spec: str, progress: Progress | None, *, local: bool) -> Path:
    import huggingface_hub

    repository, _, revision = spec.partition("@")

    def snapshot(patterns: tuple[str, ...]) -> Path:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(patterns),
            ignore_patterns=list(UNWANTED),
            local_files_only=local,
            tqdm_class=_bar_class(repository, progress),
        )
        return Path(folder)

    folder = snapshot(WANTED)
    return folder if any(folder.glob("*.safetensors")) else snapshot((*WANTED, *PYTORCH))


def _bar_class(name: str, progress: Progress | None) -> Any:
    """Return a progress bar class for the hub's client that draws nothing and reports bytes."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._in_bytes = kwargs.get("unit") == "B"
            self._done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total = kwargs.get("total")

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            if progress is not None and self._in_bytes:
                progress(f"download {name}", self._done, int(self.total or 0))
            return None

    return Bar


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
