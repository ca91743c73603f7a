"""Which plugins may take part at all, and their own settings."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jackfield.config.base import Section


class PluginSettings(Section):
    """Rules for installed plugins. A plugin is named ``NAME``, ``FAMILY.NAME`` or ``FAMILY.NAME@DISTRIBUTION``."""

    disable: tuple[str, ...] = ()
    """Never import these."""
    allow: tuple[str, ...] | None = None
    """When set, third-party plugins outside this list are never imported. The project's own distribution is always
    allowed.
    """
    required: tuple[str, ...] = ()
    """Fail at startup unless these are found and load."""
    override: dict[str, str] = Field(default_factory=dict)
    """For a name that two distributions claim: ``FAMILY.NAME`` to the distribution that shall own it."""
    strict: bool = False
    """Fail at startup when any plugin that is not disabled fails to load."""
    lock: str | None = None
    """A file that `jackfield plugins lock` wrote. Startup fails when installed plugins differ from it in version or
    content.
    """
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of plugins, by ``NAME`` or ``FAMILY.NAME``; the schema is each plugin's own."""
