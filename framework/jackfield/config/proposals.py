"""Proposals of platforms and plugins, and derived values: what may change after the user has spoken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jackfield.config import schema
from jackfield.config.build import put, validate
from jackfield.config.engine import EngineConfig
from jackfield.config.origin import Origin, Path, Problem
from jackfield.errors import ConfigError, PluginError, did_you_mean
from jackfield.interfaces.plugin import Proposal


@dataclass(frozen=True, slots=True)
class AppliedProposal:
    """What became of a proposal.

    Args:
        proposal: as it was made.
        status: ``applied``, ``agrees`` (the value was already that) or ``refused``.
        value: the value that holds now. origin: where that value comes from.
    """

    proposal: Proposal
    status: str
    value: Any
    origin: Origin


def apply_proposals(config: EngineConfig, proposals: Sequence[Proposal]) -> tuple[EngineConfig, list[AppliedProposal]]:
    """Apply proposals, those that must hold first. See :meth:`EngineConfig.with_proposals`."""
    records = {}
    for index, proposal in sorted(enumerate(proposals), key=lambda entry: not entry[1].must):
        config, records[index] = _apply(config, proposal)
    return config, [records[index] for index in range(len(proposals))]


def _apply(config: EngineConfig, proposal: Proposal) -> tuple[EngineConfig, AppliedProposal]:
    path = _proposed_path(proposal)
    origin, changed = config.origin(proposal.field), _proposed(config, path, proposal)
    value, wanted = config.get(proposal.field), changed.get(proposal.field)
    if value == wanted and (origin.by_user or origin.binding):
        return config, AppliedProposal(proposal, "agrees", value, origin)
    fixed = origin.by_user or origin.source == "proposal"
    if fixed and proposal.must and (origin.by_user or origin.binding):
        raise _conflict(proposal, value, origin)
    if fixed and not proposal.must:
        status = "agrees" if value == wanted else "refused"
        return config, AppliedProposal(proposal, status, value, origin)
    return changed, AppliedProposal(proposal, "applied", wanted, changed.origin(proposal.field))


def _proposed_path(proposal: Proposal) -> Path:
    path = schema.parse(proposal.field)
    if isinstance(path, Problem) or schema.kind_of(schema.annotation_at(path)) is schema.Kind.SECTION:
        names = [".".join(leaf.path) for leaf in schema.leaves()]
        remedy = did_you_mean(proposal.field, names) or "name a field, with its section"
        message = f"a proposal ({proposal.reason}) names '{proposal.field}', which is no setting"
        raise PluginError(message, field=proposal.field, value=proposal.value, remedy=remedy)
    return path


def _proposed(config: EngineConfig, path: Path, proposal: Proposal) -> EngineConfig:
    try:
        return _replaced(config, path, proposal.value, Origin("proposal", proposal.reason, proposal.must))
    except ConfigError as error:
        message = f"a proposal ({proposal.reason}) has a wrong value: {error.message}"
        raise PluginError(message, field=proposal.field, value=proposal.value, remedy=error.remedy) from error


def _conflict(proposal: Proposal, value: Any, origin: Origin) -> ConfigError:
    message = f"{proposal.field} is {value!r} ({origin}), but must be {proposal.value!r}: {proposal.reason}"
    remedy = f"set {proposal.field} to {proposal.value!r} or leave it out"
    if not origin.by_user:
        remedy = "the two cannot be used together: exclude one of the plugins that need them"
    return ConfigError(message, field=proposal.field, value=value, remedy=remedy)


def apply_derived(config: EngineConfig, values: Mapping[str, Any], why: str) -> EngineConfig:
    """Set values that follow from others. See :meth:`EngineConfig.with_derived`."""
    for field, value in values.items():
        path = schema.parse(field)
        if isinstance(path, Problem):
            raise KeyError(field)
        origin, current = config.origin(field), config.get(field)
        if origin.by_user and current != value:
            message = f"{field} is {current!r} ({origin}), but works out as {value!r}: {why}"
            remedy = f"set {field} to {value!r} or leave it out"
            raise ConfigError(message, field=field, value=current, remedy=remedy)
        if not origin.by_user:
            config = _replaced(config, path, value, Origin("derived", why))
    return config


def _replaced(config: EngineConfig, path: Path, value: Any, origin: Origin) -> EngineConfig:
    data = config.model_dump()
    put(data, path, value)
    return validate(data, {**config.origins, ".".join(path): origin})
