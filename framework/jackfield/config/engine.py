"""EngineConfig: the frozen configuration of an engine, with the origin of every value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, PrivateAttr

from jackfield.config import schema
from jackfield.config.origin import DEFAULT, Origin, Path, Problem
from jackfield.config.selection import Selection
from jackfield.config.tree import ConfigTree

if TYPE_CHECKING:
    from jackfield.config.proposals import AppliedProposal
    from jackfield.interfaces.plugin import Proposal

DIGEST_IGNORES = ("log", "server", "model.download_dir")
"""Settings that change no computed byte; every other one is part of the digest."""

FAMILY_FIELDS: Mapping[str, str] = {
    "platforms": "platform",
    "quantization_methods": "quantization",
    "moe_experts": "moe",
    "attention_backends": "attention",
    "ops": "ops",
}
"""The section that holds the user's word on each family; drafters are chosen by ``speculative.method`` and
scheduling policies by ``scheduler.policy``.
"""


class EngineConfig(ConfigTree):
    """All settings of an engine. Made by :func:`jackfield.config.load_config`; never changed afterwards: ``with_*``
    return new ones.
    """

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)

    def adopt(self, origins: Mapping[str, Origin]) -> None:
        """Take over origins; called once, by the builder, before anybody else sees the configuration."""
        assert not self._origins, "origins are set once"
        self._origins = dict(origins)

    @property
    def origins(self) -> Mapping[str, Origin]:
        """The origins of all values that are not defaults, by dotted name."""
        return dict(self._origins)

    @property
    def drafter(self) -> Selection:
        """The user's word on the drafter: ``speculative.method`` is forced."""
        return Selection(force=self.speculative.method)

    @property
    def scheduling_policy(self) -> Selection:
        """The user's word on the order of requests: ``scheduler.policy`` is forced, its default included, so that
        no installed plugin changes the order by being there.
        """
        return Selection(force=self.scheduler.policy)

    @property
    def model_implementation(self) -> Selection:
        """The user's word on the model's architecture: ``model.implementation`` is forced, unless it is ``auto``."""
        name = self.model.implementation
        return Selection(force=None if name == "auto" else name)

    def selection(self, family: str) -> Selection:
        """Return the user's word on a family; an empty one for families that configuration does not choose."""
        if family == "drafters":
            return self.drafter
        if family == "scheduling_policies":
            return self.scheduling_policy
        if family == "models":
            return self.model_implementation
        field = FAMILY_FIELDS.get(family)
        return Selection() if field is None else self.get(field)

    def get(self, field: str) -> Any:
        """Return the value of a dotted name, a section included.

        Raises:
            KeyError: there is no such setting, or the map has no such key.
        """
        value: Any = self
        for name in _path(field):
            value = getattr(value, name) if isinstance(value, BaseModel) else value[name]
        return value

    def origin(self, field: str) -> Origin:
        """Return where a value comes from; for a section or a map, the first origin inside it that is no default.

        Raises:
            KeyError: there is no such setting.
        """
        name = ".".join(_path(field))
        if name in self._origins:
            return self._origins[name]
        return next((origin for key, origin in self._origins.items() if key.startswith(f"{name}.")), DEFAULT)

    def is_user_set(self, field: str) -> bool:
        """Return whether a person set the field, or anything inside it. Raises KeyError for unknown names."""
        name = ".".join(_path(field))
        return any(origin.by_user for key, origin in self._origins.items() if key == name or key.startswith(f"{name}."))

    def plugin_options(self, name: str) -> Mapping[str, Any]:
        """Return the options set for a plugin, or an empty mapping."""
        return dict(self.plugins.options.get(name, {}))

    def with_proposals(self, proposals: Sequence[Proposal]) -> tuple[EngineConfig, list[AppliedProposal]]:
        """Return the configuration with proposals applied, and what became of each. A user's value is never changed.

        Raises:
            ConfigError: a proposal that must hold contradicts a user's value or another such proposal.
            PluginError: a proposal names no setting, or a value that the setting cannot take.
        """
        from jackfield.config.proposals import apply_proposals

        return apply_proposals(self, proposals)

    def with_derived(self, values: Mapping[str, Any], why: str) -> EngineConfig:
        """Return the configuration with values that follow from others, by dotted name.

        Raises:
            ConfigError: a user set one of them to something else.
        """
        from jackfield.config.proposals import apply_derived

        return apply_derived(self, values, why)

    def to_dict(self) -> dict[str, Any]:
        """Return all values as nested plain data (JSON types)."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Return the SHA-256 of all values but :data:`DIGEST_IGNORES`, in hexadecimal. Origins do not count."""
        data = self.to_dict()
        for field in DIGEST_IGNORES:
            *parents, last = field.split(".")
            holder = data
            for name in parents:
                holder = holder[name]
            del holder[last]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _path(field: str) -> Path:
    path = schema.parse(field)
    if isinstance(path, Problem):
        raise KeyError(field)
    return path
