"""How a download reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a name, bytes done, and bytes in all (0 while unknown). May be called from several threads."""
