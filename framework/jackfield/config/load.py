"""The resolution pipeline, first half: everything that people say becomes one validated configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackfield.config.build import build
from jackfield.config.checks import check
from jackfield.config.collect import Collector
from jackfield.config.engine import EngineConfig
from jackfield.config.environment import process_environment, read_variables
from jackfield.config.origin import Given, Origin, Problem, given, raise_problems
from jackfield.config.yaml_file import read_yaml


def load_config(
    cli: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
    api: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """Return the configuration; the command line and arguments of ``LLM`` win over the environment, the
    environment over the file.

    Names are short (``max_model_len``), dotted (``attention.kinds.sliding.force``) or sections with maps. A text for a
    selection forces that plugin.

    Args:
        cli: flags without their dashes.
        env: environment variables; the process's own when None.
        file: a YAML file; the one that ``JACKFIELD_CONFIG`` names when None.
        api: keyword arguments of ``LLM``.

    Raises:
        ConfigError: unknown names, wrong values, contradictions; all offenders of a stage are listed.
    """
    variables = read_variables(process_environment() if env is None else env)
    path = file or variables.config_file
    from_file, problems = read_yaml(path) if path else ({}, [])
    layers: list[Mapping[str, Given]] = [
        from_file,
        variables.values,
        {name: given(value, Origin("api", name)) for name, value in (api or {}).items()},
        {name: given(value, Origin("cli", flag(name))) for name, value in (cli or {}).items()},
    ]
    config = _resolve(layers, [*problems, *variables.problems])
    check(config)
    return config


def flag(name: str) -> str:
    """Return the command line flag of a name as :func:`load_config` takes it."""
    return "--" + (name if "." in name else name.replace("_", "-"))


def _resolve(layers: list[Mapping[str, Given]], problems: list[Problem]) -> EngineConfig:
    settings = []
    for layer in layers:
        collector = Collector()
        collector.add_all(layer)
        settings += list(collector.settings.values())
        problems += collector.problems
    raise_problems(problems)
    return build(settings)
