"""What to say when no plugin fits: the nearest miss and what would make it fit."""

from __future__ import annotations

from collections.abc import Sequence

from jackfield.errors import NoCandidateError, did_you_mean
from jackfield.interfaces import ANY, Request
from jackfield.oracle.codes import KIND, STAGES
from jackfield.oracle.render import decision_table
from jackfield.oracle.verdict import Verdict, place, request_data
from jackfield.registry import known_distributions


def no_candidate(family: str, request: Request, verdicts: Sequence[Verdict], field: str) -> NoCandidateError:
    """Return the error for a request that every candidate rejects (or that has no candidate)."""
    data = request_data(request)
    nearest = nearest_miss(verdicts)
    message = f"no plugin fits {place(family, data)}"
    remedies: list[str] = []
    if nearest is None:
        message += f": none serves '{request.kind}'"
        remedies.append(_kinds_text(request.kind, verdicts))
    else:
        message += f"; the nearest is '{nearest.name}' ({nearest.owner}): {nearest.text}"
        remedies += [reason.remedy for reason in nearest.reasons]
    remedies.append(pip_text(family, request.kind))
    remedy = "; ".join(part for part in dict.fromkeys(remedies) if part)
    table = decision_table(verdicts) if verdicts else ""
    return NoCandidateError(message, field=field, value=request.kind or None, remedy=remedy, table=table)


def nearest_miss(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the rejected candidate with the fewest reasons, then the one that came furthest, then by name.

    Candidates for other kinds of things are no near misses; None when there are no others.
    """
    near = [verdict for verdict in verdicts if not any(reason.code == KIND for reason in verdict.reasons)]
    return min(near, key=lambda v: (len(v.reasons), -STAGES.index(v.stage), v.name, v.distribution), default=None)


def pip_text(family: str, kind: str) -> str:
    """Return what is known about distributions that offer ``kind``, with the pip line; ``""`` when nothing is."""
    known = known_distributions(family, kind)
    if known is None:
        return ""
    if not known:
        return f"no distribution that offers '{kind}' is known yet"
    return " or ".join(entry.pip for entry in known)


def _kinds_text(kind: str, verdicts: Sequence[Verdict]) -> str:
    plugins = [plugin for verdict in verdicts if verdict.ref is not None and (plugin := verdict.ref.load())]
    kinds = sorted({name for plugin in plugins for name in plugin.kinds if name} - ANY)
    served = f"installed plugins serve: {', '.join(kinds)}" if kinds else "no plugin of this family is installed"
    return f"{did_you_mean(kind, kinds)} {served}".strip()
