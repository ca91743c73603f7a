"""What every plugin of a choose-one family is: a light class that says what it can do.

The rule of the house is *closed world*: a plugin has exactly the features it declares. The core compares sets;
``check()`` adds limits of shape and
combination. Nothing here may import torch or a kernel library: a plugin class is loaded to answer questions, and most
plugins are never used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

from jackfield.interfaces.facts import DeviceFacts


class Band(IntEnum):
    """How well a plugin serves a request, in words that mean the same for everybody's plugins.

    FALLBACK: right but slow. SUPPORTED: works. GOOD: tuned for this kind of device. BEST: measured ahead of the
    alternatives for this request.
    """

    FALLBACK = 0
    SUPPORTED = 1
    GOOD = 2
    BEST = 3


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a candidate cannot serve a request, as data.

    Args:
        code: a short stable identifier (``head_size``, ``missing_package``); documented in docs/reference/reasons.md.
        fact: the field of the request (or of the environment) that decided, for example ``head_size``.
        detail: what was found, for example ``"80 is not one of 64, 128, 256"``.
        remedy: what the user can change, or ``""``.
    """

    code: str
    fact: str
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Preference:
    """How much a candidate wants a request: a band, why, and an optional measured score that orders candidates
    inside one band.
    """

    band: Band = Band.SUPPORTED
    why: str = ""
    score: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is needed of one plugin: the part common to all families. Families add fields; new fields always have
    defaults.

    Args:
        component: which part of the engine asks: ``target``, ``drafter`` or ``encoder``.
        subject: what the choice is for, in the words of the family (an architecture, an attention group, an op).
        kind: the kind of thing that is needed (a layer kind, a checkpoint format, an architecture string).
        needs: features that the chosen plugin must declare.
        dtype: the computation type (``float32``, ``bfloat16``), or ``""`` where it does not matter.
        device: the device that the work runs on; ``None`` where the choice does not depend on it.
    """

    component: str = "target"
    subject: str = ""
    kind: str = ""
    needs: frozenset[str] = frozenset()
    dtype: str = ""
    device: DeviceFacts | None = None


ANY: frozenset[str] = frozenset({"*"})
"""Declares "all of them" for kinds, dtypes or device types, where a plugin truly does not care."""


class Plugin:
    """Base of every choose-one plugin class. Class variables hold the declarative half.

    A plugin author subclasses the family's class (``AttentionBackend``, ...), never this one directly.
    """

    family: ClassVar[str] = ""
    """Name of the family; set by the family's class."""
    api: ClassVar[tuple[int, int]] = (1, 0)
    """(major, minor) of the family's interface that the plugin was written against. The major is also in the entry-
    point group.
    """
    name: ClassVar[str] = ""
    """The name users write in configuration. Must equal the entry point's name."""
    summary: ClassVar[str] = ""
    """One line for ``jackfield plugins``."""
    kinds: ClassVar[frozenset[str]] = frozenset()
    """Request kinds this plugin serves."""
    features: ClassVar[frozenset[str]] = frozenset()
    """Features this plugin has. Undeclared means absent."""
    dtypes: ClassVar[frozenset[str]] = ANY
    """Computation types it runs in."""
    device_types: ClassVar[frozenset[str]] = ANY
    """Device types (``cpu``, ``cuda``) it runs on."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Distributions that must be installed, as requirement strings (``flashinfer-python>=0.6``). Checked from
    metadata, never imported for that.
    """
    opt_in: ClassVar[bool] = False
    """Whether it is a candidate only where the user names it (``force`` or ``prefer``), because using it is a choice of
    its own: it changes results, or gives up something.
    """
    options: ClassVar[Mapping[str, Option]] = {}
    """Settings of this plugin, by name; users set them under ``plugins.options.NAME``."""

    @classmethod
    def check(cls, request: Any) -> Sequence[Reason]:
        """Return every reason why this plugin cannot serve ``request``; empty when it can.

        Called after the set comparisons passed. Must be pure and must not raise: an exception is reported as
        ``check_raised``.
        """
        return ()

    @classmethod
    def preference(cls, request: Any) -> Preference:
        """Return how well this plugin serves ``request``. Called only for requests that :meth:`check` accepted."""
        return Preference()


@dataclass(frozen=True, slots=True)
class Option:
    """The schema of one plugin option.

    Args:
        type: one of ``bool``, ``int``, ``float`` and ``str``.
        default: value when the user sets nothing; None means unset.
        help: one line for ``jackfield plugins check``.
        choices: allowed values, or empty for any of the type.
    """

    type: type
    default: object
    help: str = ""
    choices: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """A limit that a platform or plugin suggests for a setting. A value that a user set is never changed by it.

    Args:
        field: dotted name of the setting (``cache.block_size``).
        value: the suggested value.
        must: ``True`` when the engine cannot run with another value: a user's different value is then an error.
            ``False``: only fills a default.
        reason: why, for the report.
    """

    field: str
    value: Any
    must: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved options of one plugin: declared defaults overlaid with what the user set."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]
