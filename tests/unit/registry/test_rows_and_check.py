"""Rows of ``jackfield plugins`` and findings of ``jackfield plugins check``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import ATTENTION, Site, attention_source

from jackfield.errors import PluginError
from jackfield.registry import Finding, Registry, check_plugin, known_distributions

ABSENT = ("@classmethod", "def probe(cls): return Probe(False, 'no driver found')")
RAISING = ("@classmethod", "def probe(cls): raise OSError('driver exploded')")


def registry(site: Site) -> Registry:
    return Registry.discover(entry_points=site.points())


def findings(site: Site, name: str) -> dict[str, tuple[bool, str]]:
    return {found.check: (found.ok, found.text) for found in check_plugin(registry(site), name)}


def test_row_of_a_good_plugin(site: Site) -> None:
    site.attention("rocket", version="1.2")
    (row,) = registry(site).rows()
    assert json.loads(json.dumps(row.to_dict())) == {
        "family": "attention_backends",
        "name": "rocket",
        "distribution": "acme-rocket",
        "version": "1.2",
        "state": "loaded",
        "api": "1.0",
        "code": "",
        "reason": "",
        "summary": "a fake",
    }


def test_rows_of_platforms_tell_whether_they_are_present(site: Site) -> None:
    site.platform("absent", *ABSENT)
    site.platform("raising", *RAISING)
    rows = {row.name: (row.state, row.code, row.reason) for row in registry(site).rows()}
    assert rows == {
        "absent": ("loaded", "not_present", "no driver found"),
        "raising": ("loaded", "probe_raised", "probe raised OSError: driver exploded"),
    }


def test_check_of_a_good_plugin(site: Site) -> None:
    site.attention("rocket", "options = {'splits': Option(int, 4)}")
    assert findings(site, "rocket") == {
        "load": (True, "fake_rocket_acme_rocket:Backend of acme-rocket 1.0"),
        "imports": (True, "fake_rocket_acme_rocket is light"),
        "methods": (True, "all written"),
        "requires": (True, "all installed"),
        "options": (True, "splits"),
        "purity": (True, "check and preference answer alike twice"),
    }


def test_check_finds_heavy_imports(site: Site) -> None:
    site.add("heavy-kernels", {}, {"heavy_kernels": ""})
    source = "import heavy_kernels\n" + attention_source("rocket", "requires = ('heavy-kernels',)")
    site.add("acme", {ATTENTION: {"rocket": "fake_heavy:Backend"}}, {"fake_heavy": source})
    assert findings(site, "rocket")["imports"] == (False, "importing fake_heavy imports heavy_kernels")


@pytest.mark.parametrize(
    ("body", "check", "text"),
    [
        (("options = {'splits': Option(int, 'four')}",), "options", "a default does not fit its own schema: option"),
        (("requires = ('no-such-package',)",), "requires", "no-such-package is not installed (pip install"),
        (("@classmethod", "def check(cls, request): raise KeyError('x')"), "purity", "check() raised KeyError: 'x'"),
        (("@classmethod", "def preference(cls, request): return 3"), "purity", "preference() raised TypeError: "),
        (
            (
                "calls = []",
                "@classmethod",
                "def preference(cls, r): cls.calls.append(1); return Preference(why=str(cls.calls))",
            ),
            "purity",
            "preference() answers the same request differently: ",
        ),
    ],
)
def test_check_finds(site: Site, body: tuple[str, ...], check: str, text: str) -> None:
    site.attention("rocket", *body)
    ok, found = findings(site, "rocket")[check]
    assert not ok and found.startswith(text)


def test_check_finds_unwritten_methods(site: Site) -> None:
    source = attention_source("rocket").partition("    @classmethod")[0]
    site.add("acme", {ATTENTION: {"rocket": "fake_short:Backend"}}, {"fake_short": source})
    assert findings(site, "rocket")["methods"] == (False, "not written: cache_specs, layer, metadata_builder")


def test_check_of_a_plugin_that_does_not_load(site: Site) -> None:
    site.add("acme", {ATTENTION: {"bad": "fake_bad:Backend"}}, {"fake_bad": "raise RuntimeError('boom')"})
    text = "plugin bad (acme 1.0) could not be loaded: RuntimeError: boom"
    assert check_plugin(registry(site), "bad") == [Finding("attention_backends.bad", "load", False, text)]
    with pytest.raises(PluginError, match="there is no plugin 'bda'") as caught:
        check_plugin(registry(site), "bda")
    assert caught.value.remedy == "did you mean 'bad'?"


def test_known_distributions(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    entry = {"name": "acme-awq", "pip": "pip install acme-awq"}
    table.write_text(json.dumps({"quantization_methods": {"awq": [entry]}}), encoding="utf-8")
    (known,) = known_distributions("quantization_methods", "awq", table) or ()
    assert (known.name, known.pip) == ("acme-awq", "pip install acme-awq")
    assert known_distributions("quantization_methods", "nothing", table) is None
    assert known_distributions("quantization_methods", "bitsandbytes") == ()


def test_importing_is_light() -> None:
    script = "import sys, jackfield.oracle; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
