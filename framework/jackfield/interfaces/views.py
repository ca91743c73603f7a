"""Read-only views of configuration that plugins may see. The core's config classes satisfy them; nothing here
imports the config package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ConfigView(Protocol):
    """The resolved configuration, by dotted field name."""

    def get(self, field: str) -> Any:
        """Return the value of ``field`` (``cache.block_size``). Raises KeyError for unknown names."""
        ...

    def is_user_set(self, field: str) -> bool:
        """Return whether a user set the field (command line, environment, file or API), as opposed to a default or
        a proposal.
        """
        ...

    def plugin_options(self, name: str) -> Mapping[str, Any]:
        """Return the user's options for plugin ``name``, or an empty mapping."""
        ...
