"""PluginRef: what is known about one plugin, from its metadata alone until someone asks for the class."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from importlib import import_module

from packaging.utils import canonicalize_name

from jackfield.errors import PluginError
from jackfield.interfaces import Plugin, Reason
from jackfield.registry.codes import LOAD_FAILED
from jackfield.registry.requirements import missing_packages

IN_PROCESS = "(in process)"
"""Stands for the distribution of a plugin that was registered by a call."""


class PluginState(StrEnum):
    """How far a plugin came."""

    DISCOVERED = "discovered"
    """Known from metadata; nothing of it was imported."""
    LOADED = "loaded"
    FAILED = "failed"
    """Cannot be used; :attr:`PluginRef.error` says why."""
    ACCEPTED = "accepted"
    """Could have served a decision of this engine."""
    ACTIVE = "active"
    """Chosen by a decision of this engine."""
    DISABLED = "disabled"
    """Kept out by the user; never imported."""


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """Why a plugin cannot be used.

    Args:
        code: reason code (``load_failed``, ``api_version``, ``duplicate_name``, ``disabled`` ...).
        stage: where it stopped: ``metadata``, ``rules``, ``import``, ``attribute``, ``class``, ``api``, or the name
            of the method that raised.
        type: type name of the plugin's own exception, or ``""`` when the core refused it.
        message: the exception's message, or what the core found.
        traceback: full traceback text of the plugin's own exception, or ``""``.
        remedy: what the user can do, or ``""``.
    """

    code: str
    stage: str
    type: str
    message: str
    traceback: str = ""
    remedy: str = ""

    @property
    def text(self) -> str:
        """One line: the exception's type and message."""
        return f"{self.type}: {self.message}" if self.type else self.message

    @classmethod
    def of(cls, error: BaseException, code: str, stage: str) -> PluginFailure:
        """Return the record of an exception that a plugin raised."""
        try:
            message = str(error)
        except Exception:
            message = "the exception has no printable message"
        return cls(code, stage, type(error).__name__, message, "".join(traceback.format_exception(error)))


class RefusedError(Exception):
    """The core refuses what an entry point resolved to; becomes a :class:`PluginFailure`."""

    def __init__(self, code: str, stage: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.failure = PluginFailure(code, stage, "", message, "", remedy)


def _anything(found: object) -> object:
    return found


@dataclass(slots=True, eq=False)
class PluginRef:
    """One plugin. Its identity never changes; its state does.

    Args:
        family: a name of ``jackfield.interfaces.FAMILIES``, or ``hooks``.
        name: entry-point name. distribution, version: the owner. target: ``module:attribute``.
        path: where the owner's metadata lies, or ``""``.
        state: how far it came. error: why it is failed or disabled.
        validate: turns the object that the entry point names into what is used, or raises RefusedError.
    """

    family: str
    name: str
    distribution: str
    version: str
    target: str
    path: str = ""
    state: PluginState = PluginState.DISCOVERED
    error: PluginFailure | None = None
    validate: Callable[[object], object] = field(default=_anything, repr=False)
    faults: dict[str, PluginFailure] = field(default_factory=dict, repr=False)
    """Exceptions that a loaded plugin raised when it was asked something, by the name of the method."""
    _object: object = field(default=None, repr=False)
    _missing: tuple[Reason, ...] | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """``family.name``, as settings spell it."""
        return f"{self.family}.{self.name}"

    @property
    def owner(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def sort_key(self) -> tuple[str, str, str, str]:
        """Order of candidates: by name and distribution, never by search path."""
        return self.name, canonicalize_name(self.distribution), self.version, self.target

    @property
    def stage(self) -> str:
        """Where the plugin stopped, or ``""`` when nothing is wrong with it."""
        return self.error.stage if self.error else ""

    @property
    def in_process(self) -> bool:
        """Whether it was registered by a call, so that other processes cannot find it."""
        return self.distribution == IN_PROCESS

    @property
    def usable(self) -> bool:
        """Whether nothing is known against it so far; says nothing about what loading would bring."""
        return self.state not in (PluginState.FAILED, PluginState.DISABLED)

    def sentence(self) -> str:
        """Return what is wrong with it, in one sentence, or ``""``."""
        if self.error is None:
            return ""
        verb = "is disabled" if self.state is PluginState.DISABLED else "could not be loaded"
        return f"plugin {self.name} ({self.owner}) {verb}: {self.error.text}"

    def reason(self) -> Reason:
        """Return the failure as a reason; only for plugins that have one."""
        assert self.error is not None
        return Reason(self.error.code, f"plugins.{self.error.stage}", self.error.text, self.error.remedy)

    def refuse(self, failure: PluginFailure, state: PluginState = PluginState.FAILED) -> None:
        """Record that the plugin cannot be used."""
        self.state, self.error = state, failure

    def record_fault(self, error: BaseException, code: str, stage: str) -> bool:
        """Keep an exception that the plugin raised when asked; True for the first of that stage."""
        if stage in self.faults:
            return False
        self.faults[stage] = PluginFailure.of(error, code, stage)
        return True

    def load_object(self) -> object | None:
        """Import the target once and return what it validates to; None when it is failed or disabled, now or before.
        Nothing that the plugin raises comes out.
        """
        if self._object is None and self.usable:
            try:
                self.adopt(_resolve(self.target))
            except RefusedError as refused:
                self.refuse(refused.failure)
        return self._object if self.usable else None

    def adopt(self, found: object) -> None:
        """Take an object that is already there, as if it had been imported; raises RefusedError."""
        self._object = self.validate(found)
        self.state = PluginState.LOADED

    def load(self) -> type[Plugin] | None:
        """Return the plugin class, or None when it cannot be used; see :attr:`error`. Imports at most once."""
        found = self.load_object()
        return found if isinstance(found, type) else None

    def require(self) -> type[Plugin]:
        """Return the plugin class.

        Raises:
            PluginError: it is failed or disabled; the message holds the plugin's own exception.
        """
        found = self.load()
        if found is None:
            remedy = self.error.remedy if self.error else ""
            raise PluginError(self.sentence(), field=self.label, value=self.target, remedy=remedy)
        return found

    def missing(self) -> tuple[Reason, ...]:
        """Return a reason for each distribution in ``requires`` that is absent or too old; empty before loading."""
        plugin = self.load()
        if plugin is None:
            return ()
        if self._missing is None:
            self._missing = tuple(missing_packages(plugin.requires))
        return self._missing


def _resolve(target: str) -> object:
    module_name, _, attribute = target.partition("[")[0].strip().partition(":")
    try:
        module = import_module(module_name.strip())
    except (Exception, SystemExit) as error:
        raise _refusal(error, "import") from error
    try:
        return reduce(getattr, attribute.strip().split("."), module) if attribute else module
    except Exception as error:
        raise _refusal(error, "attribute") from error


def _refusal(error: BaseException, stage: str) -> RefusedError:
    refused = RefusedError(LOAD_FAILED, stage, "")
    refused.failure = PluginFailure.of(error, LOAD_FAILED, stage)
    return refused
