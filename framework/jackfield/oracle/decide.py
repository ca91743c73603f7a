"""The one algorithm by which every plugin is chosen: candidates, rejection with reasons, preference, rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jackfield.config.selection import ResolvedSelection
from jackfield.errors import ConfigError, NoCandidateError, PluginError, did_you_mean
from jackfield.interfaces import Platform, Request
from jackfield.oracle.codes import CHECK_RAISED, PREFERENCE_RAISED
from jackfield.oracle.judge import Extra, judge
from jackfield.oracle.miss import no_candidate, pip_text
from jackfield.oracle.render import decision_table
from jackfield.oracle.verdict import Decision, How, Verdict, place, request_data
from jackfield.registry import PluginRef, PluginState, Registry, matches
from jackfield.registry.codes import PROBE_RAISED
from jackfield.registry.rules import spellings

RAISED = frozenset({PROBE_RAISED, CHECK_RAISED, PREFERENCE_RAISED})

Origin = Callable[[str], str]
"""From a dotted setting (``attention.force``) to where it was set, in words (``jackfield.yaml:3``)."""


def decide(
    registry: Registry,
    family: str,
    request: Request,
    selection: ResolvedSelection,
    *,
    field: str,
    extra: Extra | None = None,
    origin: Origin | None = None,
) -> Decision:
    """Choose the plugin of ``family`` that serves ``request`` best. Changes no plugin's state but loading it.

    Args:
        registry: where candidates come from.
        family: which family.
        request: what is needed.
        selection: the user's word.
        field: the section of the configuration that ``selection`` came from.
        extra: checks of the environment; asked of candidates that accept the request by themselves.
        origin: tells where a setting was set, for the report.

    Raises:
        ConfigError: the selection names a plugin that is not installed.
        NoCandidateError: the forced plugin, or every plugin, cannot serve the request.
    """
    refs = registry.refs(family)
    check_names(refs, family, request, selection, field)
    excluded_by = _dotted(field, selection.exclude_from, "exclude")
    forced_by = _dotted(field, selection.force_from, "force")
    wanted = selection.prefer if selection.force is None else (selection.force, *selection.prefer)
    verdicts = [
        judge(
            ref,
            request,
            excluded_by if _named(ref, selection.exclude) else "",
            extra,
            opt_in_by="" if _named(ref, wanted) else forced_by,
        )
        for ref in refs
    ]
    verdicts = rank(verdicts, selection.prefer)
    if selection.force is not None:
        return _forced(family, request, selection, verdicts, field, origin)
    return _free(family, request, selection, verdicts, field, origin)


def rank(verdicts: Iterable[Verdict], prefer: Sequence[str] = ()) -> list[Verdict]:
    """Return accepted verdicts by the user's order, band, score and name; rejected ones follow by name."""

    def key(verdict: Verdict) -> tuple[bool, int, int, float, str, str, str]:
        wish = verdict.preference
        band = -wish.band if wish else 0
        score = -wish.score if wish and wish.score is not None else float("inf")
        ahead = _prefer_index(verdict, prefer) if verdict.accepted else 0
        return not verdict.accepted, ahead, band, score, verdict.name, verdict.distribution.lower(), verdict.version

    return sorted(verdicts, key=key)


def mark_states(decisions: Iterable[Decision]) -> None:
    """Write the outcome of an engine's decisions into the plugins' states: chosen ones are active, other accepted ones
    accepted. Called once, for the decisions that hold.
    """
    for decision in decisions:
        for verdict in decision.verdicts:
            if verdict.accepted and verdict.ref is not None and verdict.ref.state is not PluginState.ACTIVE:
                verdict.ref.state = PluginState.ACCEPTED
        decision.ref.state = PluginState.ACTIVE


def guard_fallback(decision: Decision, registry: Registry) -> None:
    """Refuse the generic fallback platform when another platform failed and the user did not name the fallback.

    Raises:
        PluginError: with every failure.
    """
    platform = decision.plugin
    named = decision.how != "auto"
    if named or not (issubclass(platform, Platform) and platform.is_fallback):
        return
    failed = [ref.sentence() for ref in registry.refs(decision.family) if ref.state is PluginState.FAILED]
    raised = [
        f"plugin {verdict.name} ({verdict.owner}): {verdict.text}"
        for verdict in decision.rejected
        if any(reason.code in RAISED for reason in verdict.reasons)
    ]
    if failed or raised:
        text = "\n  ".join(
            [f"only the fallback platform '{decision.name}' is left, because others failed:", *failed, *raised]
        )
        remedy = f"fix or disable the failed plugin, or name the fallback: {decision.field}.force: {decision.name}"
        raise PluginError(text, field=f"{decision.field}.force", value=None, remedy=remedy)


def _forced(
    family: str,
    request: Request,
    selection: ResolvedSelection,
    verdicts: list[Verdict],
    field: str,
    origin: Origin | None,
) -> Decision:
    name = selection.force or ""
    setting = _dotted(field, selection.force_from, "force")
    data = request_data(request)
    meant = [verdict for verdict in verdicts if _means(verdict, (name,))]
    if meant[0].accepted:
        decided_at = origin(setting) if origin else ""
        return Decision(family, field, data, meant[0], tuple(verdicts), "forced", setting, decided_at)
    remedies = [reason.remedy for reason in meant[0].reasons if reason.remedy]
    others = ", ".join(verdict.name for verdict in verdicts if verdict.accepted) or "none"
    raise NoCandidateError(
        f"'{name}' was forced for {place(family, data)}, but cannot serve it: {meant[0].text}",
        field=setting,
        value=name,
        remedy="; ".join([*dict.fromkeys(remedies), f"plugins that can serve it: {others}"]),
        table=decision_table(verdicts),
    )


def _free(
    family: str,
    request: Request,
    selection: ResolvedSelection,
    verdicts: list[Verdict],
    field: str,
    origin: Origin | None,
) -> Decision:
    if not verdicts or not verdicts[0].accepted:
        raise no_candidate(family, request, verdicts, field)
    chosen = verdicts[0]
    setting = _dotted(field, selection.prefer_from, "prefer")
    how: How = "preferred" if _means(chosen, selection.prefer) else "auto"
    decided_by = setting if how == "preferred" else ""
    decided_at = origin(decided_by) if origin and decided_by else ""
    ahead = selection.prefer[: _prefer_index(chosen, selection.prefer)]
    passed = [verdict for verdict in verdicts if not verdict.accepted and _means(verdict, ahead)]
    fallback = "; ".join(f"{setting} names '{verdict.name}', passed over: {verdict.text}" for verdict in passed)
    data = request_data(request)
    return Decision(family, field, data, chosen, tuple(verdicts), how, decided_by, decided_at, fallback)


def check_names(
    refs: Sequence[PluginRef], family: str, request: Request, selection: ResolvedSelection, field: str
) -> None:
    """Refuse a selection that names plugins which are not installed.

    Raises:
        ConfigError: lists all of them, with close names.
    """
    words = {
        _dotted(field, selection.force_from, "force"): () if selection.force is None else (selection.force,),
        _dotted(field, selection.prefer_from, "prefer"): selection.prefer,
        _dotted(field, selection.exclude_from, "exclude"): selection.exclude,
    }
    unknown = [(at, name) for at, names in words.items() for name in names if not any(matches(name, r) for r in refs)]
    if not unknown:
        return
    said = "; ".join(f"{at} names '{name}'" for at, name in unknown)
    hints = dict.fromkeys(hint for _, name in unknown if (hint := did_you_mean(name, spellings(refs))))
    installed = f"installed: {', '.join(dict.fromkeys(ref.name for ref in refs)) or 'none'}"
    remedy = " ".join(part for part in (*hints, installed, pip_text(family, request.kind)) if part)
    raise ConfigError(f"no such plugin in {family}: {said}", field=unknown[0][0], value=unknown[0][1], remedy=remedy)


def _dotted(field: str, below: str, default: str) -> str:
    return f"{field}.{below or default}"


def _named(ref: PluginRef, specs: Sequence[str]) -> bool:
    return any(matches(spec, ref) for spec in specs)


def _means(verdict: Verdict, specs: Sequence[str]) -> bool:
    return verdict.ref is not None and _named(verdict.ref, specs)


def _prefer_index(verdict: Verdict, prefer: Sequence[str]) -> int:
    return next((index for index, spec in enumerate(prefer) if _means(verdict, (spec,))), len(prefer))
