"""DecisionReport: everything that was decided at startup, as data and as text."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from packaging.requirements import Requirement

from jackfield.errors import ConfigError
from jackfield.interfaces import FAMILIES
from jackfield.oracle.counterfactual import Counterfactual
from jackfield.oracle.diff import diff_reports
from jackfield.oracle.render import WIDTH, candidates, draw, overview
from jackfield.oracle.verdict import Decision
from jackfield.registry.requirements import installed_version

SCHEMA_VERSION = 1

_SUMMARY_WORDS = {"ops": "ops ", "moe_experts": "experts ", "drafters": "drafter ", "logits_processors": "processors "}
_NOT_IN_SUMMARY = frozenset({"scheduling_policies"})
"""Families that play no part in what is computed."""

_logger = logging.getLogger("jackfield.oracle")


@dataclass(frozen=True, slots=True)
class ProposalOutcome:
    """What became of a plugin's proposal.

    Args:
        field, value, must, reason: the proposal. owner: the plugin that made it (``family.name``).
        applied: whether the setting has the proposed value because of it.
        note: why it was not applied (the user's own value), or ``""``.
    """

    field: str
    value: Any
    must: bool
    reason: str
    owner: str
    applied: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class DecisionReport:
    """The report of one engine.

    Args:
        decisions: in the order in which they were made.
        proposals: of platforms and plugins, applied or refused.
        notes: sentences for the user (lost features and their cause).
        counterfactuals: values of the user that cost a band.
        environment: ``python``, and ``distributions``: versions of the owners of chosen plugins and of what they
            require.
        schema_version: of this data.
    """

    decisions: tuple[Decision, ...] = ()
    proposals: tuple[ProposalOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    counterfactuals: tuple[Counterfactual, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def build(
        cls,
        decisions: Sequence[Decision],
        *,
        proposals: Iterable[ProposalOutcome] = (),
        notes: Iterable[str] = (),
        counterfactuals: Iterable[Counterfactual] = (),
    ) -> DecisionReport:
        """Return the report of ``decisions`` of this process, with its environment."""
        environment = environment_of(decisions)
        return cls(tuple(decisions), tuple(proposals), tuple(notes), tuple(counterfactuals), environment)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data."""
        return {
            "schema_version": self.schema_version,
            "summary": self.summary(),
            "decisions": [decision.to_dict() for decision in self.decisions],
            "proposals": [asdict(proposal) for proposal in self.proposals],
            "notes": list(self.notes),
            "counterfactuals": [entry.to_dict() for entry in self.counterfactuals],
            "environment": dict(self.environment),
        }

    def to_json(self) -> str:
        """Return JSON text, indented, keys in a fixed order."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, default=str)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DecisionReport:
        """Return what :meth:`to_dict` wrote, without the plugins.

        Raises:
            ConfigError: the data has another schema version, or is no report.
        """
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            message = f"the report has schema version {version}, this version reads {SCHEMA_VERSION}"
            remedy = "write it again with 'jackfield explain --json'"
            raise ConfigError(message, field="schema_version", value=version, remedy=remedy)
        return cls(
            tuple(Decision.from_dict(entry) for entry in data["decisions"]),
            tuple(ProposalOutcome(**entry) for entry in data["proposals"]),
            tuple(data["notes"]),
            tuple(Counterfactual(**entry) for entry in data["counterfactuals"]),
            data["environment"],
        )

    @classmethod
    def from_json(cls, text: str) -> DecisionReport:
        """Return what :meth:`to_json` wrote.

        Raises:
            ConfigError: the text is not a report of this schema version.
        """
        try:
            data = json.loads(text)
            return cls.from_dict(data)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            message = f"this is not a decision report: {type(error).__name__}: {error}"
            remedy = "write one with 'jackfield explain --json'"
            raise ConfigError(message, field="report", value=text[:80], remedy=remedy) from None

    def summary(self) -> str:
        """Return the chosen plugins of the target model in one line: ``cpu · LlamaForCausalLM · gguf · torch_sdpa``."""
        chosen = [(entry.family, entry.name) for entry in self.decisions if _component(entry) == "target"]
        known = dict.fromkeys([*FAMILIES, *(family for family, _ in chosen)])
        families = [family for family in known if family not in _NOT_IN_SUMMARY]
        names = {family: "+".join(dict.fromkeys(n for f, n in chosen if f == family)) for family in families}
        return " · ".join(f"{_SUMMARY_WORDS.get(family, '')}{name}" for family, name in names.items() if name)

    def render(self, width: int = WIDTH, color: bool = False) -> str:
        """Return the report as text: an overview, all candidates of each decision, proposals, notes."""
        parts: list[Any] = [self.summary(), overview(self.decisions)]
        for decision in self.decisions:
            parts += [decision.place, candidates(decision.verdicts, decision.chosen)]
            parts += [f"fallback: {decision.fallback}"] if decision.fallback else []
        parts += [_proposal_text(proposal) for proposal in self.proposals]
        parts += [f"counterfactual: {entry.text}" for entry in self.counterfactuals]
        parts += [f"note: {note}" for note in self.notes]
        return draw(parts, width=width, color=color)


def environment_of(decisions: Iterable[Decision]) -> dict[str, Any]:
    """Return the python version, and the versions of the distributions that own or serve the chosen plugins."""
    versions: dict[str, str] = {}
    for decision in decisions:
        versions[decision.chosen.distribution] = decision.chosen.version
        for text in decision.plugin.requires:
            name = Requirement(text).name
            versions[name] = installed_version(name) or "not needed here"
    return {"python": platform.python_version(), "distributions": dict(sorted(versions.items()))}


def diff(a: DecisionReport, b: DecisionReport) -> list[str]:
    """Return what differs between two reports, one line each; empty when they say the same."""
    return diff_reports(a.to_dict(), b.to_dict())


def log_decisions(report: DecisionReport) -> None:
    """Log one INFO line for each decision."""
    for decision in report.decisions:
        fallback = f"; {decision.fallback}" if decision.fallback else ""
        said = f"{decision.band.name}, {decision.how_text}: {decision.why or 'no reason given'}{fallback}"
        _logger.info("%s: %s (%s), %s", decision.place, decision.name, decision.chosen.owner, said)


def _component(decision: Decision) -> str:
    return str(decision.request.get("component", "target"))


def _proposal_text(proposal: ProposalOutcome) -> str:
    outcome = "applied" if proposal.applied else f"not applied: {proposal.note}"
    strength = "must" if proposal.must else "should"
    said = f"{proposal.owner} proposes {proposal.field} = {proposal.value} ({strength}): {proposal.reason}"
    return f"proposal: {said}; {outcome}"
