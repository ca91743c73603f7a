"""What commands that talk to a server share: its key, progress, and files that they write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from jackfield.cli.flags import EngineFlags

_KEY_NAMES = ("api_key", "server.api_key")
_QUIET_SECONDS = 30.0
"""Between two lines of progress where nobody watches."""


def server_key(given: str | None) -> str | None:
    """Return the key that was given, or the environment's, or None."""
    from jackfield.config.environment import client_key

    return client_key() if given is None else given


def key_of_flags(engine: EngineFlags) -> str | None:
    """Return the key for a server, from the flags of a command that takes engine flags as well.

    Raises:
        ConfigError: there are engine flags, which a server that runs already cannot follow.
    """
    without = [f"--{name.replace('_', '-')}" for name in engine.settings if name not in _KEY_NAMES]
    without += ["--config"] if engine.file is not None else []
    if without:
        raise ConfigError(
            f"{', '.join(without)} has no effect on a server that runs already",
            field="--url",
            value=" ".join(without),
            remedy="leave it out, or give it to `jackfield serve`",
        )
    found = [str(engine.settings[name]) for name in _KEY_NAMES if name in engine.settings]
    return server_key(found[-1] if found else None)


def check_writable(path: Path | None, flag: str) -> None:
    """Raise when a file cannot be written, before anything was done.

    Raises:
        ConfigError: its folder does not exist, or it is a folder.
    """
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        text = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
        raise ConfigError(f"the file {text}", field=flag, value=str(path), remedy="name a file in a folder that exists")


@contextmanager
def progress(total: int, *, always: bool = False) -> Iterator[Callable[[], object]]:
    """Give a callback that counts one more request on stderr. Where stderr is no terminal, nothing is shown, or now and
    then a line when ``always`` is set.
    """
    from tqdm import tqdm

    watched = sys.stderr.isatty()
    seconds = 0.1 if watched else _QUIET_SECONDS
    with tqdm(total=total, unit="req", file=sys.stderr, mininterval=seconds, disable=not (watched or always)) as bar:
        yield bar.update
