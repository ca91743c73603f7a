"""The commands, as a cyclopts app. Modules of commands import what they need inside their functions."""

from __future__ import annotations

from cyclopts import App

from jackfield.cli import (
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
    train_drafter,
    tune,
    version,
)
from jackfield.cli.bench import bench_app

COMMANDS_WITH_ENGINE = (
    *("generate", "chat", "serve", "bench latency", "bench throughput", "run-batch", "save-sharded-state", "quantize"),
    "train-drafter",
    *("explain", "plugins check", "plugins lock", "plugins", "models", "config show", "tune moe"),
)
"""Commands that take engine flags; longer names first."""

_HELP = """Run large language models; every part that differs is a plugin.

`jackfield COMMAND --help` shows a command's flags. `--traceback` shows where an error comes from."""


def build_app(*, with_flags_help: bool = False) -> App:
    """Return the app; ``with_flags_help`` adds the engine flags to the help of commands that take them."""
    app = App(name="jackfield", help=_HELP, version=version.text, help_format="plaintext")
    epilogue = _epilogue() if with_flags_help else None
    app.command(generate.generate, name="generate", help_epilogue=epilogue)
    app.command(chat.chat, name="chat", help_epilogue=epilogue)
    app.command(serve.serve, name="serve", help_epilogue=epilogue)
    app.command(bench_app(epilogue))
    app.command(run_batch.run_batch, name="run-batch", help_epilogue=epilogue)
    app.command(pull.pull, name="pull")
    app.command(save_state.save_sharded_state, name="save-sharded-state", help_epilogue=epilogue)
    app.command(quantize.quantize, name="quantize", help_epilogue=epilogue)
    app.command(train_drafter.train_drafter, name="train-drafter", help_epilogue=epilogue)
    app.command(explain.explain, name="explain", help_epilogue=epilogue)
    app.command(_plugins_app(epilogue))
    app.command(models.list_models, name="models", help_epilogue=epilogue)
    app.command(new_plugin.new_plugin, name="new-plugin")
    app.command(doctor.doctor, name="doctor")
    app.command(_config_app(epilogue))
    app.command(_tune_app(epilogue))
    app.command(version.version, name="version")
    return app


def add_plugin_commands(app: App) -> None:
    """Let plugins that listen to ``register_commands`` add theirs. Called only for commands that are not the core's,
    so that no other command pays for it.
    """
    from jackfield.config import load_config
    from jackfield.registry import HookBus, Registry

    bus = HookBus()
    bus.load(Registry.discover(load_config().plugins).refs("hooks"))
    bus.emit("register_commands", app=app)


def _epilogue() -> str:
    from jackfield.cli.flags import flags_help

    return flags_help()


def _plugins_app(epilogue: str | None) -> App:
    app = App(name="plugins", help="List installed plugins and their state.", help_epilogue=epilogue)
    app.default(plugins.list_plugins)
    app.command(plugins.check, name="check", help_epilogue=epilogue)
    app.command(plugins.lock, name="lock", help_epilogue=epilogue)
    return app


def _config_app(epilogue: str | None) -> App:
    app = App(name="config", help="Look at the configuration.")
    app.command(config_show.show_config, name="show", help_epilogue=epilogue)
    return app


def _tune_app(epilogue: str | None) -> App:
    app = App(name="tune", help="Measure what is fastest on this machine, and keep it.")
    app.command(tune.moe, name="moe", help_epilogue=epilogue)
    return app
