"""``jackfield config show``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags


def show_config(
    model: str | None = None,
    *,
    origin: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Show the configuration that a command with the same flags would use.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME.
    origin
        Say where each value comes from.
    json
        Print JSON.
    """
    import dataclasses

    from jackfield.cli.tables import print_json, print_table
    from jackfield.config import show

    rows = show(engine.config(model), origin=origin)
    if json:
        print_json([dataclasses.asdict(row) for row in rows])
    elif origin:
        print_table(("setting", "value", "origin"), [(row.field, _text(row.value), row.origin) for row in rows])
    else:
        print_table(("setting", "value"), [(row.field, _text(row.value)) for row in rows])
    return 0


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "not set"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
