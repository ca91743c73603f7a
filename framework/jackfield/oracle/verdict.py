"""Verdict and Decision: what the oracle says about one candidate, and about one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Literal

from jackfield.interfaces import Band, Plugin, Preference, Reason, Request
from jackfield.oracle.codes import ACCEPTED
from jackfield.registry import PluginRef

How = Literal["forced", "preferred", "auto"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the oracle says about one candidate.

    Args:
        name, distribution, version, target: which plugin.
        stage: where it was rejected (one of STAGES), or ``accepted``.
        reasons: why; empty when accepted.
        preference: how much it wants the request; None unless accepted.
        ref: the plugin itself; None in a report that was read from a file.
    """

    name: str
    distribution: str
    version: str
    target: str
    stage: str
    reasons: tuple[Reason, ...] = ()
    preference: Preference | None = None
    ref: PluginRef | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, ref: PluginRef, stage: str, reasons: tuple[Reason, ...] = (), preference: Preference | None = None
    ) -> Verdict:
        """Return the verdict on ``ref``."""
        return cls(ref.name, ref.distribution, ref.version, ref.target, stage, reasons, preference, ref)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """Return what :meth:`to_dict` wrote, without the plugin."""
        preference = data["preference"]
        if preference is not None:
            preference = Preference(Band[preference["band"]], preference["why"], preference["score"])
        reasons = tuple(Reason(**reason) for reason in data["reasons"])
        names = {name: data[name] for name in ("name", "distribution", "version", "target", "stage")}
        return cls(**names, reasons=reasons, preference=preference)

    @property
    def accepted(self) -> bool:
        """Whether the candidate can serve the request."""
        return self.stage == ACCEPTED

    @property
    def owner(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def text(self) -> str:
        """All reasons in one line, or why it was accepted."""
        if self.preference is not None:
            return self.preference.why
        return "; ".join(f"{reason.code}: {reason.detail}" for reason in self.reasons)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data."""
        preference = self.preference
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "target": self.target,
            "stage": self.stage,
            "reasons": [asdict(reason) for reason in self.reasons],
            "preference": preference
            and {"band": preference.band.name, "why": preference.why, "score": preference.score},
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """What the oracle chose for one request, and everything it looked at.

    Args:
        family: which family. field: section of the configuration that steers it (``attention``).
        request: the request as JSON-able data.
        chosen: the verdict on the chosen plugin.
        verdicts: all candidates: accepted ones in their order, then rejected ones by name.
        how: ``forced``, ``preferred`` or ``auto``.
        setting: the setting that decided (``attention.kinds.sliding.force``), or ``""``.
        origin: where that setting was set, in the caller's words, or ``""``.
        fallback: which preferred plugins were passed over and why, or ``""``.
    """

    family: str
    field: str
    request: Mapping[str, Any]
    chosen: Verdict
    verdicts: tuple[Verdict, ...]
    how: How = "auto"
    setting: str = ""
    origin: str = ""
    fallback: str = ""

    @property
    def ref(self) -> PluginRef:
        """The chosen plugin; only for decisions of this process."""
        assert self.chosen.ref is not None, "a decision that was read from a file has no plugin"
        return self.chosen.ref

    @property
    def plugin(self) -> type[Plugin]:
        """The chosen class; only for decisions of this process."""
        return self.ref.require()

    @property
    def name(self) -> str:
        """Name of the chosen plugin."""
        return self.chosen.name

    @property
    def preference(self) -> Preference:
        """The chosen plugin's own preference."""
        assert self.chosen.preference is not None
        return self.chosen.preference

    @property
    def band(self) -> Band:
        """Band of the chosen plugin."""
        return self.preference.band

    @property
    def why(self) -> str:
        """The chosen plugin's own words."""
        return self.preference.why

    @property
    def runners_up(self) -> tuple[Verdict, ...]:
        """Accepted candidates that were not chosen, best first."""
        return tuple(verdict for verdict in self.verdicts if verdict.accepted and verdict != self.chosen)

    @property
    def rejected(self) -> tuple[Verdict, ...]:
        """Candidates that cannot serve the request."""
        return tuple(verdict for verdict in self.verdicts if not verdict.accepted)

    @property
    def place(self) -> str:
        """What was decided, for people: family, component, subject or kind, phase."""
        return place(self.family, self.request)

    @property
    def how_text(self) -> str:
        """``auto``, or how with the setting and where it was set."""
        setting = f" by {self.setting}" if self.setting else ""
        return f"{self.how}{setting}{f' ({self.origin})' if self.origin else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data."""
        return {
            "family": self.family,
            "field": self.field,
            "request": dict(self.request),
            "chosen": self.chosen.to_dict(),
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "how": self.how,
            "setting": self.setting,
            "origin": self.origin,
            "fallback": self.fallback,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decision:
        """Return what :meth:`to_dict` wrote, without the plugins."""
        verdicts = tuple(Verdict.from_dict(verdict) for verdict in data["verdicts"])
        return cls(**{**data, "chosen": Verdict.from_dict(data["chosen"]), "verdicts": verdicts})


def place(family: str, request: Mapping[str, Any]) -> str:
    """Return what a request is for: ``attention_backends for target, layers 0-3 (full, decode)``."""
    said = [str(request.get(name, "")) for name in ("subject", "kind", "phase")]
    details = ", ".join(word for word in said[1:] if word and word != said[0])
    subject = f", {said[0]}" if said[0] else ""
    return f"{family} for {request.get('component', 'target')}{subject}{f' ({details})' if details else ''}"


def request_data(request: Request) -> dict[str, Any]:
    """Return a request as JSON-able data: sets sorted, mappings as dicts, enums by name, anything else by repr. Fields
    that are declared with ``repr=False`` are left out.
    """
    data = _plain(request)
    assert isinstance(data, dict)
    return data


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | bool | float) or type(value) is int:
        return value
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value) if entry.repr}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, frozenset | set):
        return sorted((_plain(entry) for entry in value), key=repr)
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return repr(value)
