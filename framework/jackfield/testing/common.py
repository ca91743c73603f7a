"""What every plugin must do, whatever its family: the base of the families' conformance classes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import packages_distributions
from typing import Any, ClassVar

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jackfield.interfaces import FAMILIES, Plugin, Preference, Reason, Request
from jackfield.oracle.judge import set_reasons
from jackfield.oracle.verdict import request_data
from jackfield.registry import Manifest, PluginRef
from jackfield.registry.options import resolve_options
from jackfield.registry.validation import validate_plugin
from jackfield.testing.bench import Bench, check_reasons, device_for, facts_of, find_ref, in_process_ref, siblings
from jackfield.testing.child import HEAVY, Told, ask
from jackfield.testing.samples import SAMPLES

NOWHERE = "a feature that nobody has"


class PluginConformance:
    """Common checks. Subclass the family's class and write the fixture ``plugin``, which returns the plugin's class."""

    family: ClassVar[str] = ""
    installed: ClassVar[bool] = True
    """Whether an installed distribution declares the plugin. Without that only this process knows it."""
    extra_samples: ClassVar[Mapping[str, Request]] = {}
    """Requests of the author's own, by name: formats, kinds and sizes that the kit does not know."""

    @pytest.fixture
    def plugin(self) -> type[Plugin]:
        """The class under test; written by the author."""
        pytest.fail(f"write a fixture 'plugin' in {type(self).__name__} that returns the plugin's class")

    @pytest.fixture
    def ref(self, plugin: type[Plugin]) -> PluginRef:
        """The plugin as the registry knows it."""
        if not self.installed:
            return in_process_ref(plugin)
        ref = find_ref(plugin)
        group = FAMILIES[plugin.family].group if plugin.family in FAMILIES else "?"
        assert ref is not None, (
            f"no installed distribution declares '{plugin.name}' as {plugin.__module__}:{plugin.__qualname__} in the "
            f'group "{group}"; declare it in pyproject.toml and run: pip install -e . --no-build-isolation'
        )
        return ref

    @pytest.fixture
    def bench(self, plugin: type[Plugin], ref: PluginRef) -> Bench:
        """The plugin on a device; without one that it runs on, or without its packages, its tests are skipped."""
        device = device_for(plugin)
        if device is None:
            pytest.skip(f"{plugin.name} needs a device of {', '.join(sorted(plugin.device_types))}")
        if missing := ref.missing():
            pytest.skip(f"{plugin.name}: {'; '.join(reason.detail for reason in missing)}")
        return Bench(ref, plugin, device, facts_of(device))

    @pytest.fixture
    def told(self, plugin: type[Plugin], ref: PluginRef) -> Told:
        """What a fresh process says of the plugin: of all that its owner has in the family, or if they are at fault of
        it alone.
        """
        if ref.in_process:
            pytest.skip("a class of this process cannot be found by another one")
        needed = (name for text in plugin.requires for name in _import_names(Requirement(text).name))
        watched = tuple(sorted({*HEAVY, *needed}))
        told = ask(_manifest(siblings(ref)), watched)
        return ask(_manifest((ref,)), watched) if told.error or told.heavy or told.changed else told

    def samples(self, plugin: type[Plugin]) -> Mapping[str, Request]:
        """Return the requests that the plugin is asked about, by name; equal ones each time."""
        return {**SAMPLES[plugin.family](plugin), **self.extra_samples}

    def test_it_is_a_complete_class_of_its_family(self, plugin: type[Plugin]) -> None:
        """It subclasses the family's base, writes all its methods, and says what it is."""
        assert plugin.family == self.family, (
            f"{plugin.__name__} is of '{plugin.family}', the tests are of '{self.family}'"
        )
        validate_plugin(plugin, FAMILIES[self.family], plugin.name)
        unwritten = [name for name in dir(plugin) if getattr(getattr(plugin, name), "__isabstractmethod__", False)]
        assert not unwritten, f"not written: {', '.join(unwritten)}"
        assert plugin.name and plugin.summary, "name and summary are what users see in `jackfield plugins`"

    def test_its_entry_point_resolves_to_it(self, plugin: type[Plugin], ref: PluginRef) -> None:
        """An installed distribution declares it under its own name, in a group of this core's major version."""
        assert ref.require() is plugin
        assert ref.name == plugin.name

    def test_another_process_finds_it_once_without_an_environment(self, ref: PluginRef, told: Told) -> None:
        """A spawned process loads it from the manifest, with the same digest, and only once."""
        assert told.error == ""
        assert told.once and told.digest in {Manifest.of(refs).digest for refs in ((ref,), siblings(ref))}

    def test_loading_it_is_light_and_changes_nothing(self, told: Told) -> None:
        """Choosing imports neither torch nor a kernel library, and leaves the process as it was."""
        assert told.heavy == (), "import these only in the method that builds the real object"
        assert not told.changed, "loading the class changed the environment, logging, the folder or the search path"

    def test_its_options_have_defaults_that_fit(self, plugin: type[Plugin]) -> None:
        """Each default is of the option's own type and choices."""
        defaults = {name: option.default for name, option in plugin.options.items() if option.default is not None}
        resolve_options(plugin.name, plugin.options, defaults)
        assert all(option.help for option in plugin.options.values()), "options without help"

    def test_answers_are_pure_and_never_raise(self, plugin: type[Plugin]) -> None:
        """The same question has the same answer, and asking changes neither the request nor anything else."""
        for name, request in self.samples(plugin).items():
            if set_reasons(plugin, request):
                continue  # the core refuses it without asking
            before = json.dumps(request_data(request))
            answers = [_answers(plugin, request) for _ in range(2)]
            assert answers[0] == answers[1], f"{name}: two answers to one request"
            assert json.dumps(request_data(request)) == before, f"{name}: check changed the request"

    def test_refusals_have_reasons(self, plugin: type[Plugin], bench: Bench) -> None:
        """What it does not take it refuses with a code and a text; in 'check' and not by an exception."""
        for request in self.samples(plugin).values():
            bench.accepts(request)

    def test_what_it_does_not_declare_it_does_not_have(self, plugin: type[Plugin], bench: Bench) -> None:
        """A feature that is newer than the plugin is refused where it is needed."""
        for request in self.samples(plugin).values():
            verdict = bench.verdict(_needing(request))
            assert not verdict.accepted
            check_reasons(verdict)

    def test_something_is_accepted(self, plugin: type[Plugin], bench: Bench) -> None:
        """A plugin that takes nothing would pass every other test."""
        verdicts = {name: bench.verdict(request) for name, request in self.samples(plugin).items()}
        told = "\n".join(f"  {name}: {verdict.text}" for name, verdict in verdicts.items())
        assert any(verdict.accepted for verdict in verdicts.values()), f"{plugin.name} takes nothing:\n{told}"


def _manifest(refs: Sequence[PluginRef]) -> str:
    return json.dumps(Manifest.of(refs).to_dict())


def _answers(plugin: type[Plugin], request: Request) -> tuple[list[Reason], Preference | None]:
    reasons = list(plugin.check(request))
    assert all(isinstance(reason, Reason) for reason in reasons), f"check returned {reasons!r}, not reasons"
    preference: Any = None if reasons else plugin.preference(request)
    assert preference is None or isinstance(preference, Preference), f"preference returned {preference!r}"
    return reasons, preference


def _needing(request: Request) -> Request:
    return replace(request, needs=request.needs | {NOWHERE})


@cache
def _import_names(distribution: str) -> tuple[str, ...]:
    """Return the top-level modules of a distribution; of one that is not installed, what they are likely called."""
    wanted = canonicalize_name(distribution)
    names = [name for name, owners in _owners().items() if wanted in {canonicalize_name(owner) for owner in owners}]
    return tuple(names) or (wanted.replace("-", "_"),)


@cache
def _owners() -> Mapping[str, list[str]]:
    return packages_distributions()
