"""Registry: which plugins there are, who owns them, whether they load, and which of them every process must load."""

from jackfield.registry.check import Finding, check_plugin
from jackfield.registry.codes import REGISTRY_CODES
from jackfield.registry.hooks import HookBus
from jackfield.registry.known import KnownDistribution, known_distributions
from jackfield.registry.lock import PluginLock
from jackfield.registry.manifest import Manifest, ManifestEntry
from jackfield.registry.ref import IN_PROCESS, PluginFailure, PluginRef, PluginState
from jackfield.registry.registry import Registry
from jackfield.registry.rows import PluginRow
from jackfield.registry.rules import matches

__all__ = [
    "IN_PROCESS",
    "REGISTRY_CODES",
    "Finding",
    "HookBus",
    "KnownDistribution",
    "Manifest",
    "ManifestEntry",
    "PluginFailure",
    "PluginLock",
    "PluginRef",
    "PluginRow",
    "PluginState",
    "Registry",
    "check_plugin",
    "known_distributions",
    "matches",
]
