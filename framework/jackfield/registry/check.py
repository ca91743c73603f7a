"""``jackfield plugins check NAME``: everything that can be said about a plugin without using it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jackfield.errors import PluginError, did_you_mean
from jackfield.interfaces import (
    AttentionRequest,
    DeviceFacts,
    DrafterRequest,
    ExpertsRequest,
    LogitsRequest,
    ModelRequest,
    OpRequest,
    PlatformRequest,
    Plugin,
    Preference,
    QuantizationRequest,
    Reason,
    Request,
    SchedulingRequest,
)
from jackfield.registry.options import resolve_options
from jackfield.registry.ref import PluginRef
from jackfield.registry.registry import Registry
from jackfield.registry.rules import matches, spellings

IMPORT_SECONDS = 60
"""How long importing a plugin's module may take before the check gives up."""

REQUESTS: dict[str, type[Request]] = {
    "platforms": PlatformRequest,
    "models": ModelRequest,
    "quantization_methods": QuantizationRequest,
    "moe_experts": ExpertsRequest,
    "attention_backends": AttentionRequest,
    "ops": OpRequest,
    "drafters": DrafterRequest,
    "scheduling_policies": SchedulingRequest,
    "logits_processors": LogitsRequest,
}

_IMPORT_SCRIPT = """
import importlib, json, sys
path, module, watched = json.loads(sys.argv[1])
sys.path[:] = path
importlib.import_module(module)
print(json.dumps([name for name in watched if name in sys.modules]))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    Args:
        plugin: ``family.name``. check: what was looked at (``load``, ``methods``, ``requires``, ``imports``,
            ``options``, ``purity``). ok: whether it is in order. text: what was found.
    """

    plugin: str
    check: str
    ok: bool
    text: str


def check_plugin(registry: Registry, name: str) -> list[Finding]:
    """Return the findings for every plugin that ``name`` means, good ones included.

    Raises:
        PluginError: no plugin has that name.
    """
    refs = [ref for ref in registry.refs() if matches(name, ref)]
    if not refs:
        remedy = did_you_mean(name, spellings(registry.refs()))
        raise PluginError(f"there is no plugin '{name}'", field="plugin", value=name, remedy=remedy)
    return [Finding(ref.label, *finding) for ref in refs for finding in _findings(ref)]


def _findings(ref: PluginRef) -> Iterator[tuple[str, bool, str]]:
    if ref.load_object() is None:
        yield "load", False, ref.sentence()
        return
    yield "load", True, f"{ref.target} of {ref.owner}"
    plugin = ref.load()
    yield _imports(ref, plugin.requires if plugin else ())
    if plugin is not None:
        yield _methods(plugin)
        yield _requires(ref)
        yield _options(plugin)
        yield _purity(plugin)


def _methods(plugin: type[Plugin]) -> tuple[str, bool, str]:
    names = [name for name in dir(plugin) if getattr(getattr(plugin, name, None), "__isabstractmethod__", False)]
    return "methods", not names, f"not written: {', '.join(names)}" if names else "all written"


def _requires(ref: PluginRef) -> tuple[str, bool, str]:
    missing = ref.missing()
    text = "; ".join(f"{reason.detail} ({reason.remedy})" for reason in missing)
    return "requires", not missing, text or "all installed"


def _options(plugin: type[Plugin]) -> tuple[str, bool, str]:
    try:
        defaults = {name: option.default for name, option in plugin.options.items() if option.default is not None}
        resolve_options(plugin.name, plugin.options, defaults)
    except Exception as error:
        return "options", False, f"a default does not fit its own schema: {error}"
    return "options", True, ", ".join(sorted(plugin.options)) or "none"


def _imports(ref: PluginRef, requires: tuple[str, ...]) -> tuple[str, bool, str]:
    module = ref.target.partition(":")[0]
    watched = ["torch", *(name for text in requires for name in _import_names(Requirement(text).name))]
    argument = json.dumps([sys.path, module, watched])
    command = [sys.executable, "-c", _IMPORT_SCRIPT, argument]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "imports", False, f"importing {module} takes more than {IMPORT_SECONDS} s"
    if done.returncode:
        return "imports", False, f"importing {module} alone fails: {done.stderr.strip().rpartition(chr(10))[2]}"
    heavy = json.loads(done.stdout.splitlines()[-1])
    return "imports", not heavy, f"importing {module} imports {', '.join(heavy)}" if heavy else f"{module} is light"


def _import_names(distribution: str) -> list[str]:
    wanted = canonicalize_name(distribution)
    owned = packages_distributions().items()
    names = [name for name, owners in owned if wanted in {canonicalize_name(owner) for owner in owners}]
    return names or [wanted.replace("-", "_")]


def _purity(plugin: type[Plugin]) -> tuple[str, bool, str]:
    request = _sample(plugin)
    calls: list[tuple[str, Callable[[], object]]] = [("check", lambda: _checked(plugin, request))]
    if not _try(calls[0][1])[0]:
        calls.append(("preference", lambda: _preferred(plugin, request)))
    for name, call in calls:
        first, second = _try(call), _try(call)
        if first[1] or second[1]:
            return "purity", False, f"{name}() raised {first[1] or second[1]}"
        if first != second:
            return "purity", False, f"{name}() answers the same request differently: {first[0]}, then {second[0]}"
    return "purity", True, f"{' and '.join(name for name, _ in calls)} answer alike twice"


def _sample(plugin: type[Plugin]) -> Request:
    def first(names: frozenset[str], default: str) -> str:
        return min(names - {"*"}, default=default)

    device = DeviceFacts(first(plugin.device_types, "cpu"))
    kind, dtype = first(plugin.kinds, ""), first(plugin.dtypes, "float32")
    return REQUESTS[plugin.family](kind=kind, dtype=dtype, device=device)


def _checked(plugin: type[Plugin], request: Request) -> list[Reason]:
    reasons = list(plugin.check(request))
    if not all(isinstance(reason, Reason) for reason in reasons):
        raise TypeError(f"check returned {reasons!r}, not reasons")
    return reasons


def _preferred(plugin: type[Plugin], request: Request) -> Preference:
    found: object = plugin.preference(request)
    if not isinstance(found, Preference):
        raise TypeError(f"preference returned {found!r}, not a Preference")
    return found


def _try(call: Callable[[], object]) -> tuple[object, str]:
    try:
        return call(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
