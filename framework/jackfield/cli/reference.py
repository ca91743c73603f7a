"""docs/reference/cli.md, made from the app and the schema."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jackfield.cli.app import COMMANDS_WITH_ENGINE, build_app
from jackfield.cli.flags import flag_names
from jackfield.cli.models import render_models
from jackfield.cli.reference_tables import render_metrics, render_plugins
from jackfield.config.reference import render_reference as render_config
from jackfield.testing.capabilities import render_capabilities


def commands() -> dict[str, Any]:
    """Return the functions of all commands by name (``plugins check``)."""
    from jackfield.cli import (
        bench_offline,
        bench_serve,
        chat,
        config_show,
        doctor,
        explain,
        generate,
        models,
        new_plugin,
        plugins,
        pull,
        quantize,
        run_batch,
        save_state,
        serve,
        tune,
        version,
    )

    return {
        "generate": generate.generate,
        "chat": chat.chat,
        "serve": serve.serve,
        "bench serve": bench_serve.serve,
        "bench latency": bench_offline.latency,
        "bench throughput": bench_offline.throughput,
        "run-batch": run_batch.run_batch,
        "pull": pull.pull,
        "save-sharded-state": save_state.save_sharded_state,
        "quantize": quantize.quantize,
        "explain": explain.explain,
        "plugins": plugins.list_plugins,
        "plugins check": plugins.check,
        "plugins lock": plugins.lock,
        "models": models.list_models,
        "new-plugin": new_plugin.new_plugin,
        "doctor": doctor.doctor,
        "config show": config_show.show_config,
        "tune moe": tune.moe,
        "version": version.version,
    }


def command_flags(command: str) -> list[str]:
    """Return the flags of one command, without engine flags."""
    app = build_app()
    for part in command.split():
        app = app[part]
    collection = app.assemble_argument_collection(default_parameter=None)
    return sorted(
        {name for argument in collection if argument.parse for name in argument.names if name.startswith("--")}
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
    for name, function in commands().items():
        yield from ("", f"## jackfield {name}", "", inspect.cleandoc(function.__doc__ or "").split("\n\n")[0], "")
        flags = ", ".join(f"`{flag}`" for flag in command_flags(name))
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
