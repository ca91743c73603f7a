"""Registry: every plugin of this process, loaded or not, with its owner and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from jackfield.config.plugins import PluginSettings
from jackfield.errors import PluginError, did_you_mean
from jackfield.interfaces import FAMILIES, Plugin, Settings
from jackfield.registry.adapters import ADAPTERS, Adapters
from jackfield.registry.discovery import HOOKS, discover
from jackfield.registry.hooks import validate_hooks
from jackfield.registry.lock import check_lock
from jackfield.registry.manifest import Manifest, refs_of, refuse_in_process
from jackfield.registry.options import resolve_options
from jackfield.registry.ref import IN_PROCESS, PluginRef, PluginState, RefusedError
from jackfield.registry.rows import PluginRow, plugin_row
from jackfield.registry.rules import (
    apply_rules,
    claims_name,
    disable,
    matches,
    spellings,
    unknown_names,
    unknown_names_error,
)
from jackfield.registry.validation import validator

_FAMILY_ORDER = {name: index for index, name in enumerate((*FAMILIES, HOOKS))}


class Registry:
    """A set of plugins.

    Args:
        refs: the plugins.
        rules: the user's settings for them; their states are not applied here but by :meth:`discover`.
        copies: distributions whose metadata lies in several places, with the paths.
    """

    def __init__(
        self,
        refs: Iterable[PluginRef] = (),
        rules: PluginSettings | None = None,
        copies: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self._refs = list(refs)
        self.rules = rules or PluginSettings()
        self.copies = dict(copies or {})
        self._frozen = False

    @classmethod
    def discover(
        cls,
        settings: PluginSettings | None = None,
        entry_points: Iterable[EntryPoint] | None = None,
        adapters: Adapters = ADAPTERS,
    ) -> Registry:
        """Return the installed plugins (or those of ``entry_points``). Imports none of them. ``adapters`` are for
        plugins of previous major versions.

        Raises:
            ConfigError: a setting names a plugin that is not installed, or a lock that cannot be read.
            PluginError: what is installed differs from the lock.
        """
        rules = settings or PluginSettings()
        found = discover(entry_points, validate_hooks, adapters)
        apply_rules(found.refs, rules, found.copies)
        if rules.lock is not None:
            check_lock(rules.lock, found.refs)
        return cls(found.refs, rules, found.copies)

    @classmethod
    def from_manifest(
        cls,
        manifest: Manifest | Mapping[str, Any],
        settings: PluginSettings | None = None,
        adapters: Adapters = ADAPTERS,
    ) -> Registry:
        """Return a frozen registry with exactly the plugins of ``manifest``, all loaded. Of ``settings`` only the
        options are used.

        Raises:
            PluginError: what is installed differs from the manifest, or a plugin does not load.
        """
        checked = manifest if isinstance(manifest, Manifest) else Manifest.from_dict(manifest)
        registry = cls(refs_of(checked, adapters), settings)
        registry.freeze()
        return registry

    @property
    def frozen(self) -> bool:
        """Whether :meth:`register` is closed."""
        return self._frozen

    def freeze(self) -> None:
        """Close :meth:`register`: an engine was built from this registry."""
        self._frozen = True

    def refs(self, family: str | None = None) -> tuple[PluginRef, ...]:
        """Return all plugins, or those of one family, by family, name and distribution."""
        found = [ref for ref in self._refs if family is None or ref.family == family]
        last = len(_FAMILY_ORDER)
        return tuple(sorted(found, key=lambda ref: (_FAMILY_ORDER.get(ref.family, last), ref.family, *ref.sort_key)))

    def get(self, family: str, name: str) -> PluginRef:
        """Return the plugin of that name; where several have it, one that is usable.

        Raises:
            PluginError: there is none; close names are listed.
        """
        refs = self.refs(family)
        found = sorted((ref for ref in refs if matches(name, ref)), key=lambda ref: not ref.usable)
        if not found:
            names = ", ".join(dict.fromkeys(ref.name for ref in refs)) or "none"
            remedy = f"{did_you_mean(name, spellings(refs))} installed: {names}".strip()
            raise PluginError(f"there is no plugin '{name}' in {family}", field=family, value=name, remedy=remedy)
        return found[0]

    def register(self, plugin: type[Plugin], *, override: bool = False) -> PluginRef:
        """Add a plugin class of this process, for notebooks and tests. Nothing changes when it raises.

        Args:
            plugin: a class of one of the families.
            override: take the name over from the plugin that has it.

        Raises:
            PluginError: the class is malformed, the name is taken, or an engine was already built.
        """
        ref = _in_process_ref(plugin)
        if self._frozen:
            message = f"plugin {ref.name} cannot be registered: an engine was already built from this registry"
            raise PluginError(message, field=ref.label, value=ref.target, remedy="register before building the engine")
        taken = [other for other in self._refs if other.label == ref.label and claims_name(other)]
        if taken and not override:
            owners = " and ".join(other.owner for other in taken)
            message = f"{ref.label} is already provided by {owners}"
            raise PluginError(message, field=ref.label, value=ref.target, remedy="pass override=True, or choose a name")
        self._refs = [other for other in self._refs if not (other in taken and other.in_process)] + [ref]
        for other in taken:
            disable(other, f"replaced in this process by {ref.target}", "register without override=True")
        return ref

    def enforce(self) -> None:
        """Load what the settings say must load: ``plugins.required``, and with ``plugins.strict`` everything.

        Raises:
            PluginError: one of them does not load; all are listed.
            ConfigError: ``plugins.options`` names a plugin that does not exist.
        """
        if unknown := unknown_names({"plugins.options": tuple(self.rules.options)}, self._refs):
            raise unknown_names_error(unknown, self._refs)
        faults = [fault for spec in self.rules.required for fault in self._required_faults(spec)]
        field = "plugins.required" if faults else "plugins.strict"
        if self.rules.strict:
            enabled = [ref for ref in self.refs() if ref.state is not PluginState.DISABLED]
            faults += [ref.sentence() for ref in enabled if ref.load_object() is None]
        if faults:
            value = list(self.rules.required) if field == "plugins.required" else True
            remedy = "fix or uninstall the plugin, or change the setting"
            raise PluginError("\n  ".join(dict.fromkeys(faults)), field=field, value=value, remedy=remedy)

    def settings(self, ref: PluginRef, user_options: Mapping[str, Any] | None = None) -> Settings:
        """Return the options of one plugin: its defaults overlaid with ``user_options``, or where that is None with
        those of ``plugins.options`` under its name and its ``family.name``.

        Raises:
            ConfigError: an option is unknown or has a wrong value.
            PluginError: the plugin does not load.
        """
        if user_options is None:
            user_options = {**self.rules.options.get(ref.name, {}), **self.rules.options.get(ref.label, {})}
        return resolve_options(ref.name, ref.require().options, user_options)

    def manifest(self, refs: Iterable[PluginRef], *, for_spawn: bool = False) -> Manifest:
        """Return ``refs`` as data for worker processes.

        Raises:
            PluginError: ``for_spawn`` and one of them exists in this process only.
        """
        chosen = list(refs)
        if for_spawn:
            refuse_in_process(sorted(ref.name for ref in chosen if ref.in_process))
        return Manifest.of(chosen)

    def rows(self) -> list[PluginRow]:
        """Return one row for each plugin, for ``jackfield plugins``. Loads every class that may be loaded, each in
        isolation, and asks platforms whether they are present.
        """
        return [plugin_row(ref) for ref in self.refs()]

    def _required_faults(self, spec: str) -> list[str]:
        faults = []
        for ref in (ref for ref in self.refs() if matches(spec, ref)):
            if ref.load_object() is None:
                faults.append(ref.sentence())
            faults += [f"plugin {ref.name} ({ref.owner}) cannot be used: {reason.detail}" for reason in ref.missing()]
        return faults


def _in_process_ref(plugin: type[Plugin]) -> PluginRef:
    family = FAMILIES.get(getattr(plugin, "family", ""))
    if family is None:
        message = f"{plugin!r} is not a plugin class; families: {', '.join(FAMILIES)}"
        raise PluginError(message, field="plugin", value=plugin, remedy="subclass a base of jackfield.interfaces")
    target = f"{plugin.__module__}:{plugin.__qualname__}"
    ref = PluginRef(family.name, plugin.name, IN_PROCESS, "", target, validate=validator(family, plugin.name))
    try:
        ref.adopt(plugin)
    except RefusedError as refused:
        message = f"plugin {plugin.name or plugin.__name__} cannot be registered: {refused}"
        raise PluginError(message, field=ref.label, value=target, remedy=refused.failure.remedy) from None
    if not plugin.name:
        raise PluginError(f"{target} has no name", field="name", value="", remedy="set the class variable 'name'")
    return ref
