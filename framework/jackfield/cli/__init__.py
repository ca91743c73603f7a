"""The command line. ``main`` is the console script; everything else is imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with ``argv`` (the process's own when None) and return the exit code."""
    from jackfield.cli.entry import run

    return run(argv)
