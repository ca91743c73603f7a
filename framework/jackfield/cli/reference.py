"""docs/reference/cli.md, made from the app and the schema."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from cyclopts import App

from jackfield.cli.app import COMMANDS_WITH_ENGINE, build_app
from jackfield.cli.flags import flag_names
from jackfield.cli.models import render_models
from jackfield.cli.reference_tables import render_metrics, render_plugins
from jackfield.config.reference import render_reference as render_config
from jackfield.testing.capabilities import render_capabilities


def commands() -> dict[str, App]:
    """Return the apps of all commands by name (``plugins check``)."""
    return dict(_named(build_app(), ""))


def _named(app: App, before: str) -> Iterator[tuple[str, App]]:
    for part in app:
        if not part.startswith("-"):
            if app[part].default_command is not None:
                yield before + part, app[part]
            yield from _named(app[part], f"{before}{part} ")


def command_flags(command: App) -> list[str]:
    """Return the flags of one command, without engine flags."""
    arguments = command.assemble_argument_collection(default_parameter=None)
    return sorted(
        {name for argument in arguments if argument.parse for name in argument.names if name.startswith("--")}
    )


def render_reference() -> str:
    """Return docs/reference/cli.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Command line"
    yield ""
    yield "<!-- Made by `make docs-config`; do not edit. -->"
    yield ""
    yield "`--traceback` works with every command."
    yield "Exit codes: 0 done, 1 internal error, 2 user's error, 130 interrupted."
    for name, command in commands().items():
        about = inspect.getdoc(command.default_command) or ""
        yield from ("", f"## jackfield {name}", "", about.split("\n\n")[0], "")
        flags = ", ".join(f"`{flag}`" for flag in command_flags(command))
        yield f"Flags: {flags or 'none'}" + (" and the engine flags." if name in COMMANDS_WITH_ENGINE else ".")
    yield from ("", "## Engine flags", "", "What each one means is in [the list of settings](config.md).", "")
    yield from (f"- `{flag}`" for flag in flag_names())


def write_references(folder: Path) -> None:
    """Write all generated pages into ``folder``, and ``models.md`` and ``plugins/capabilities.md`` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.md").write_text(render_config(), encoding="utf-8")
    (folder / "cli.md").write_text(render_reference(), encoding="utf-8")
    (folder / "plugins.md").write_text(render_plugins(), encoding="utf-8")
    (folder / "metrics.md").write_text(render_metrics(), encoding="utf-8")
    plugins = folder.parent / "plugins"
    plugins.mkdir(exist_ok=True)
    (plugins / "capabilities.md").write_text(render_capabilities(), encoding="utf-8")
    (folder.parent / "models.md").write_text(render_models(), encoding="utf-8")


if __name__ == "__main__":
    write_references(Path("docs/reference"))
