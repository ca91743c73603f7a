"""The pytest plugin: runs the engine's own suite through a plugin of one's choice.

``pytest --pyargs jackfield.testing.suite --attention-backend rocket`` needs no copy of this repository.
"""

from __future__ import annotations

from typing import Any

import pytest

SLOW = "slow: takes more than a few seconds (packaging)"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("jackfield", "Jackfield plugins")
    group.addoption("--attention-backend", metavar="NAME", help="run the engine's suite with this attention backend")
    group.addoption(
        "--engine-setting",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="run the engine's suite with this setting (scheduler.policy=mine); may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of slow tests, so that authors may run with --strict-markers."""
    config.addinivalue_line("markers", SLOW)
    engine_settings(config)


def engine_settings(config: pytest.Config) -> dict[str, Any]:
    """Return the settings that the command line asks engines to be run with.

    Raises:
        pytest.UsageError: a setting is not FIELD=VALUE.
    """
    settings: dict[str, Any] = {}
    for text in config.getoption("engine_setting"):
        field, equals, value = text.partition("=")
        if not (field and equals):
            raise pytest.UsageError(f"--engine-setting {text}: write FIELD=VALUE, for example scheduler.policy=fcfs")
        settings[field] = value
    if backend := config.getoption("attention_backend"):
        settings["attention.force"] = backend
    return settings
