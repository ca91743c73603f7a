"""What every plugin must do, for all that the project declares; the families' own tests are beside this file."""

from __future__ import annotations

from suites import suite

from jackfield.registry import Registry
from jackfield.testing import PluginConformance

for _ref in Registry.discover().refs():
    _plugin = _ref.load() if _ref.distribution == "jackfield" else None
    if _plugin is not None:
        _name = f"Test_{_ref.family}_{_ref.name}"
        globals()[_name] = suite(PluginConformance, _plugin, family=_ref.family)


def test_all_of_the_projects_plugins_load() -> None:
    own = [ref for ref in Registry.discover().refs() if ref.distribution == "jackfield"]
    assert [ref.sentence() for ref in own if ref.load_object() is None] == []
    assert len(own) > 100
