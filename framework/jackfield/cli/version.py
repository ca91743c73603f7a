"""``jackfield version``."""

from __future__ import annotations


def text() -> str:
    """Return the version of this installation."""
    from jackfield import __version__

    return __version__


def version() -> int:
    """Print the version."""
    print(text())
    return 0
