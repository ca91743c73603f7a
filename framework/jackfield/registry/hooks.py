"""HookBus: broadcast events. pluggy finds and checks the listeners; each is called in isolation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pluggy

from jackfield.errors import did_you_mean
from jackfield.interfaces.hooks import Hooks
from jackfield.registry.codes import LOAD_FAILED
from jackfield.registry.ref import PluginRef, RefusedError
from jackfield.registry.rules import unknown_names_error

ROUTES = "register_routes"

_logger = logging.getLogger("jackfield.hooks")


@dataclass(frozen=True, slots=True)
class _Listener:
    name: str
    owner: str
    call: Callable[..., object]
    arguments: tuple[str, ...]


def validate_hooks(found: object) -> object:
    """Return the listener object of an entry point: a module, an object, or a class, which is instantiated.

    Raises:
        RefusedError: it listens to an unknown event, takes arguments that the event does not have, or is a wrapper.
    """
    try:
        listener = found() if isinstance(found, type) else found
    except Exception as error:
        raise RefusedError(LOAD_FAILED, "class", f"{type(error).__name__}: {error}") from error
    manager = _manager()
    try:
        manager.register(listener)
    except pluggy.PluginValidationError as error:
        raise RefusedError(LOAD_FAILED, "class", _signature_text(manager, listener, error)) from error
    for caller in manager.get_hookcallers(listener) or ():
        _check_event(manager, caller)
    return listener


class HookBus:
    """The listeners of one process, in the order in which they hear events: by name, ``tryfirst`` ones ahead."""

    def __init__(self) -> None:
        self._manager = _manager()
        self._owners: dict[str, str] = {}
        self._listeners: dict[str, list[_Listener]] = {}

    def load(self, refs: Iterable[PluginRef]) -> None:
        """Load and add hook plugins. One that fails is left out; its ref says why."""
        for ref in sorted(refs, key=lambda ref: ref.sort_key, reverse=True):
            listener = ref.load_object()
            if listener is not None:
                self._add(listener, ref.name, ref.owner)
        self._refresh()

    def add(self, listener: object, name: str) -> None:
        """Add a listener of this process, for notebooks and tests.

        Raises:
            RefusedError: see :func:`validate_hooks`.
            ValueError: the name or the object is already there.
        """
        self._add(validate_hooks(listener), name, "(in process)")
        self._refresh()

    def listeners(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the listeners of each event that has any, in the order of calls."""
        return {event: tuple(entry.name for entry in entries) for event, entries in self._listeners.items()}

    def emit(self, event: str, **arguments: Any) -> None:
        """Tell every listener. Exceptions of listeners do not come out: the listener is switched off."""
        listeners = self._listeners.get(event)
        if listeners:
            assert event != ROUTES, "routes are registered with register_routes()"
            self._call(event, listeners, arguments)

    def register_routes(self, app: Any, allowed: Collection[str]) -> None:
        """Let the plugins named in ``allowed`` add routes to ``app``; nobody else is called.

        Raises:
            ConfigError: a name belongs to no plugin that registers routes.
        """
        listeners = self._listeners.get(ROUTES, [])
        known = {entry.name for entry in listeners}
        if unknown := sorted(set(allowed) - known):
            refs = [PluginRef("hooks", name, "", "", "") for name in sorted(known)]
            raise unknown_names_error({"server.allow_routes": unknown}, refs)
        self._call(ROUTES, [entry for entry in listeners if entry.name in allowed], {"app": app})

    def _add(self, listener: object, name: str, owner: str) -> None:
        self._manager.register(listener, name)
        self._owners[name] = owner

    def _call(self, event: str, listeners: list[_Listener], arguments: dict[str, Any]) -> None:
        for listener in tuple(listeners):
            if listener.name not in self._owners:
                continue
            try:
                listener.call(*[arguments[name] for name in listener.arguments])
            except Exception:
                text = "hook plugin %s (%s) raised in %s and is switched off"
                _logger.exception(text, listener.name, listener.owner, event)
                self._switch_off(listener.name)

    def _switch_off(self, name: str) -> None:
        self._manager.unregister(name=name)
        del self._owners[name]
        self._refresh()

    def _refresh(self) -> None:
        self._listeners = {}
        for event in _events():
            implementations = getattr(self._manager.hook, event).get_hookimpls()
            entries = [
                _Listener(entry.plugin_name, self._owners[entry.plugin_name], entry.function, entry.argnames)
                for entry in reversed(implementations)
            ]
            if entries:
                self._listeners[event] = entries


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("jackfield")
    manager.add_hookspecs(Hooks)
    return manager


def _events() -> list[str]:
    return [name for name in vars(Hooks) if not name.startswith("_")]


def _check_event(manager: pluggy.PluginManager, caller: pluggy.HookCaller) -> None:
    if not caller.has_spec():
        hint = did_you_mean(caller.name, _events())
        raise RefusedError(
            LOAD_FAILED, "class", f"there is no event '{caller.name}'; events: {', '.join(_events())}", hint
        )
    if any(entry.hookwrapper or entry.wrapper for entry in caller.get_hookimpls()):
        raise RefusedError(LOAD_FAILED, "class", f"'{caller.name}' is a wrapper; events are broadcasts without results")


def _signature_text(manager: pluggy.PluginManager, listener: object, error: pluggy.PluginValidationError) -> str:
    events = [event for event in _events() if manager.parse_hookimpl_opts(listener, event) is not None]
    specs = [getattr(manager.hook, event).spec for event in events]
    available = "; ".join(f"{spec.name}({', '.join(spec.argnames)})" for spec in specs)
    return f"{' '.join(str(error).split())}; available arguments: {available}"
