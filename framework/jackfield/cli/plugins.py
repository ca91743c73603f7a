"""``jackfield plugins``, ``plugins check`` and ``plugins lock``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags

_COLUMNS = ("family", "name", "distribution", "version", "state", "reason")


def list_plugins(
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """List installed plugins: what they are, whose they are, and whether they can be used.

    Parameters
    ----------
    json
        Print JSON.
    """
    from jackfield.cli.tables import print_json, print_table

    rows = [_as_dict(row) for row in _registry(engine).rows()]
    if json:
        print_json(rows)
    else:
        print_table(_COLUMNS, [[str(row.get(column) or "") for column in _COLUMNS] for row in rows])
    return 0


def check(
    name: str,
    /,
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Check one plugin: that it loads, fits its family, stays light, and answers without raising. Exit code 2
    when something is at fault.

    Parameters
    ----------
    name
        NAME, FAMILY.NAME or FAMILY.NAME@DISTRIBUTION.
    json
        Print JSON.
    """
    from jackfield.cli.tables import print_json
    from jackfield.registry import check_plugin

    findings = check_plugin(_registry(engine), name)
    if json:
        print_json([_as_dict(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{'ok   ' if finding.ok else 'FAULT'} {finding.plugin} {finding.check}: {finding.text}")
    return 0 if all(finding.ok for finding in findings) else 2


def lock(
    *,
    output: Path = Path("jackfield-plugins.lock"),
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Write which plugins are installed, with versions and hashes. An engine started with --plugins.lock FILE refuses
    to start when anything differs.

    Parameters
    ----------
    output
        The file.
    """
    from jackfield.registry import PluginLock, Registry

    settings = engine.config().plugins.model_copy(update={"lock": None})
    found = PluginLock.of(Registry.discover(settings).refs())
    output.write_text(found.text(), encoding="utf-8")
    count = sum(len(entry.plugins) for entry in found.distributions)
    print(f"{output}: {count} plugins of {len(found.distributions)} distributions")
    return 0


def _registry(engine: EngineFlags) -> Any:
    from jackfield.registry import Registry

    return Registry.discover(engine.config().plugins)


def _as_dict(record: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(record)
