"""Options of a plugin."""

from __future__ import annotations

import pytest
from fakes import attention_class

from jackfield.config.plugins import PluginSettings
from jackfield.errors import ConfigError
from jackfield.interfaces import Option
from jackfield.registry import Registry

SCHEMA = {
    "splits": Option(int, 4, "how many splits"),
    "mode": Option(str, "fast", choices=("fast", "exact")),
    "factor": Option(float, 0.5),
    "debug": Option(bool, False),
}


def registry(settings: PluginSettings | None = None) -> Registry:
    made = Registry(rules=settings)
    made.register(attention_class("rocket", options=SCHEMA))
    return made


def test_defaults_and_values() -> None:
    made = registry()
    settings = made.settings(made.refs()[0], {"splits": 8, "factor": 2})
    assert settings.values == {"splits": 8, "mode": "fast", "factor": 2.0, "debug": False}
    assert type(settings["factor"]) is float


def test_from_the_configuration_by_name_and_by_family() -> None:
    made = registry(PluginSettings(options={"rocket": {"splits": 8}, "attention_backends.rocket": {"mode": "exact"}}))
    settings = made.settings(made.refs()[0])
    assert (settings["splits"], settings["mode"]) == (8, "exact")


@pytest.mark.parametrize(
    ("user", "message", "remedy"),
    [
        (
            {"split": 1},
            "plugin 'rocket' has no option 'split'",
            "did you mean 'splits'? options: debug, factor, mode, splits",
        ),
        ({"splits": True}, "option 'splits' of plugin 'rocket' must be of type int, not bool", "how many splits"),
        ({"splits": 1.5}, "option 'splits' of plugin 'rocket' must be of type int, not float", "how many splits"),
        ({"mode": "slow"}, "option 'mode' of plugin 'rocket' must be one of 'fast', 'exact'", ""),
    ],
)
def test_faults(user: dict[str, object], message: str, remedy: str) -> None:
    made = registry()
    with pytest.raises(ConfigError) as caught:
        made.settings(made.refs()[0], user)
    key = next(iter(user))
    assert caught.value.message == message and caught.value.remedy == remedy
    assert (caught.value.field, caught.value.value) == (f"plugins.options.rocket.{key}", user[key])


def test_all_faults_are_listed() -> None:
    made = registry()
    with pytest.raises(ConfigError) as caught:
        made.settings(made.refs()[0], {"debug": 1, "mode": 3})
    assert caught.value.message == (
        "option 'debug' of plugin 'rocket' must be of type bool, not int; "
        "option 'mode' of plugin 'rocket' must be of type str, not int"
    )
