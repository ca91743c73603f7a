"""The environment, read here and nowhere else.

``JACKFIELD_SECTION__FIELD`` sets a field, ``JACKFIELD_CONFIG`` names a configuration file, ``JACKFIELD_CACHE`` the
folder of the model cache, and ``JACKFIELD_API_KEY`` the key that a server asks for and clients of one send.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jackfield.config import renamed, schema
from jackfield.config.origin import Given, Origin, Problem, given
from jackfield.errors import did_you_mean

PREFIX = "JACKFIELD_"
CONFIG_FILE = "JACKFIELD_CONFIG"
CACHE_FOLDER = "JACKFIELD_CACHE"
API_KEY = "JACKFIELD_API_KEY"


@dataclass(slots=True)
class Variables:
    """What the environment says: values under dotted names, a configuration file, and what is wrong."""

    values: dict[str, Given] = field(default_factory=dict)
    config_file: Path | None = None
    problems: list[Problem] = field(default_factory=list)


def process_environment() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def client_key(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the key that clients send to servers, or None."""
    return (process_environment() if environ is None else environ).get(API_KEY) or None


def variable_name(dotted: str) -> str:
    """Return the variable that sets a field.

    >>> variable_name("cache.block_size")
    'JACKFIELD_CACHE__BLOCK_SIZE'
    """
    return PREFIX + dotted.replace(".", "__").upper()


def read_variables(environ: Mapping[str, str]) -> Variables:
    """Return what ``environ`` says about the engine. Unknown ``JACKFIELD_`` names are problems, and so are the names
    by which other engines choose among their parts.
    """
    result = Variables()
    for name in sorted(environ):
        if name.startswith(PREFIX):
            _read(name, environ[name], result)
        elif name in renamed.table():
            origin = Origin("env", name)
            result.problems.append(_with(renamed.table()[name].problem(), environ[name], origin))
    return result


def _read(name: str, value: str, result: Variables) -> None:
    if name == CONFIG_FILE:
        result.config_file = Path(value).expanduser() if value else None
        return
    origin = Origin("env", name)
    if name == CACHE_FOLDER:
        result.values.setdefault("model.download_dir", given(value or None, origin))
        return
    if name == API_KEY:
        result.values.setdefault("server.api_key", given((value,) if value else (), origin))
        return
    dotted = name.removeprefix(PREFIX).lower().replace("__", ".")
    if isinstance(schema.parse(dotted), Problem):
        result.problems.append(_unknown(name, value, origin))
        return
    result.values[dotted] = given(value, origin)


def _unknown(name: str, value: str, origin: Origin) -> Problem:
    known = {variable_name(".".join(leaf.path)): leaf.flat for leaf in schema.leaves()}
    short = [variable for variable, flat in known.items() if flat and PREFIX + flat.upper() == name]
    remedy = (
        f"did you mean '{short[0]}'?" if short else did_you_mean(name, [*known, CONFIG_FILE, CACHE_FOLDER, API_KEY])
    )
    remedy = remedy or "unset it; settings are JACKFIELD_SECTION__FIELD"
    return Problem(name, f"the environment variable {name} is not a setting", value, remedy, origin)


def _with(problem: Problem, value: str, origin: Origin) -> Problem:
    return Problem(problem.field, problem.message, value, problem.remedy, origin)
