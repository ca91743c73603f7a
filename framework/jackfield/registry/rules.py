"""The user's rules for plugins: disable, allow, required, override; and the rule that a name has one owner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from packaging.utils import canonicalize_name

from jackfield.config.plugins import PluginSettings
from jackfield.errors import ConfigError, did_you_mean
from jackfield.registry.codes import API_VERSION, DISABLED, DUPLICATE_NAME
from jackfield.registry.ref import PluginFailure, PluginRef, PluginState

OWN_DISTRIBUTION = "jackfield"


def matches(spec: str, ref: PluginRef) -> bool:
    """Return whether ``NAME``, ``FAMILY.NAME`` or either with ``@DISTRIBUTION`` means ``ref``."""
    name, at, distribution = spec.partition("@")
    if at and canonicalize_name(distribution) != canonicalize_name(ref.distribution):
        return False
    return name in (ref.name, ref.label)


def spellings(refs: Iterable[PluginRef]) -> set[str]:
    """Return the names under which ``refs`` can be meant, for suggestions."""
    return {spelling for ref in refs for spelling in (ref.name, ref.label)}


def apply_rules(refs: Sequence[PluginRef], settings: PluginSettings, copies: Mapping[str, tuple[str, ...]]) -> None:
    """Set the states that follow from the user's settings and from duplicate names.

    Raises:
        ConfigError: a setting names a plugin or an owner that is not installed; all offenders are listed.
    """
    _check_names(refs, settings, copies)
    for ref in refs:
        _apply_disable(ref, settings)
    groups: defaultdict[str, list[PluginRef]] = defaultdict(list)
    for ref in refs:
        if claims_name(ref):
            groups[ref.label].append(ref)
    _check_override(groups, settings)
    for label, claimants in groups.items():
        _settle(label, claimants, settings.override.get(label))


def claims_name(ref: PluginRef) -> bool:
    """Return whether ``ref`` stands in the way of another plugin with its name."""
    if ref.state is PluginState.DISABLED:
        return False
    return ref.error is None or ref.error.code != API_VERSION


def disable(ref: PluginRef, message: str, remedy: str = "") -> None:
    """Keep ``ref`` out, with the reason."""
    ref.refuse(PluginFailure(DISABLED, "rules", "", message, "", remedy), PluginState.DISABLED)


def unknown_names(words: Mapping[str, Iterable[str]], refs: Sequence[PluginRef]) -> dict[str, list[str]]:
    """Return the names in each setting that mean no plugin, by setting; settings without any are left out."""
    unknown = {
        field: [spec for spec in specs if not any(matches(spec, ref) for ref in refs)] for field, specs in words.items()
    }
    return {field: specs for field, specs in unknown.items() if specs}


def unknown_names_error(unknown: Mapping[str, Sequence[str]], refs: Sequence[PluginRef], note: str = "") -> ConfigError:
    """Return the error for names that mean no plugin, with close matches for each."""
    said = "; ".join(f"{field} names {', '.join(map(repr, specs))}" for field, specs in unknown.items())
    known = spellings(refs)
    hints = [hint for specs in unknown.values() for spec in specs if (hint := did_you_mean(spec, known))]
    names = ", ".join(sorted({ref.label for ref in refs})) or "none"
    field, specs = next(iter(unknown.items()))
    remedy = " ".join([*dict.fromkeys(hints), f"installed: {names}", *([note] if note else [])])
    return ConfigError(f"no such plugin: {said}", field=field, value=list(specs), remedy=remedy)


def copies_note(copies: Mapping[str, tuple[str, ...]]) -> str:
    """Return a sentence for each distribution whose metadata lies in several places, all paths named."""
    return " ".join(
        f"distribution '{name}' has metadata in {len(paths)} places, the first is used: {', '.join(paths)}."
        for name, paths in sorted(copies.items())
    )


def _check_names(refs: Sequence[PluginRef], settings: PluginSettings, copies: Mapping[str, tuple[str, ...]]) -> None:
    words = {
        "plugins.disable": settings.disable,
        "plugins.allow": settings.allow or (),
        "plugins.required": settings.required,
        "plugins.override": tuple(settings.override),
    }
    if unknown := unknown_names(words, refs):
        raise unknown_names_error(unknown, refs, copies_note(copies))


def _apply_disable(ref: PluginRef, settings: PluginSettings) -> None:
    if any(matches(spec, ref) for spec in settings.disable):
        disable(ref, "plugins.disable names it", "remove it from plugins.disable")
    elif not _allowed(ref, settings):
        disable(ref, "plugins.allow does not name it", f"add '{ref.name}' to plugins.allow")


def _allowed(ref: PluginRef, settings: PluginSettings) -> bool:
    if settings.allow is None or canonicalize_name(ref.distribution) == OWN_DISTRIBUTION:
        return True
    return any(matches(spec, ref) for spec in settings.allow)


def _check_override(groups: Mapping[str, list[PluginRef]], settings: PluginSettings) -> None:
    for label, owner in settings.override.items():
        owners = {canonicalize_name(ref.distribution) for ref in groups.get(label, ())}
        if canonicalize_name(owner) not in owners:
            hint = did_you_mean(owner, owners)
            remedy = f"{hint} owners: {', '.join(sorted(owners)) or 'none'}".strip()
            message = f"'{owner}' does not own {label}"
            raise ConfigError(message, field=f"plugins.override.{label}", value=owner, remedy=remedy)


def _settle(label: str, claimants: list[PluginRef], owner: str | None) -> None:
    if owner is not None:
        for ref in claimants:
            if canonicalize_name(ref.distribution) != canonicalize_name(owner):
                disable(ref, f"plugins.override gives {label} to '{owner}'", "change plugins.override")
        claimants = [ref for ref in claimants if ref.state is not PluginState.DISABLED]
    if len(claimants) > 1:
        failure = _duplicate(label, claimants)
        for ref in claimants:
            ref.refuse(failure)


def _duplicate(label: str, claimants: list[PluginRef]) -> PluginFailure:
    claimants = sorted(claimants, key=lambda ref: ref.sort_key)
    owners = sorted({ref.distribution for ref in claimants}, key=canonicalize_name)
    if len(owners) == 1:
        targets = " and ".join(ref.target for ref in claimants)
        message = f"{owners[0]} declares {label} more than once: {targets}"
        return PluginFailure(DUPLICATE_NAME, "rules", "", message, "", f"remove one of them from {owners[0]}")
    message = f"{label} is claimed by {' and '.join(ref.owner for ref in claimants)}"
    settings = " or ".join(f"plugins.override: {{{label}: {owner}}}" for owner in owners)
    return PluginFailure(DUPLICATE_NAME, "rules", "", message, "", f"set {settings}")
