"""Fake distributions on disk and fake plugin classes, for tests of the registry and the oracle."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any, ClassVar

from jackfield.interfaces import ANY, AttentionBackend, DeviceFacts, Platform, Preference, Probe, Reason
from jackfield.registry import Manifest, Registry

ATTENTION = "jackfield.attention_backends.v1"
PLATFORMS = "jackfield.platforms.v1"

ATTENTION_SOURCE = """
from jackfield.interfaces import AttentionBackend, Band, Option, Preference, Reason

class Backend(AttentionBackend):
    name = "{name}"
    summary = "a fake"
    kinds = frozenset({{"full"}})
    features = frozenset({{"decode"}})
{body}
    @classmethod
    def cache_specs(cls, request): return []
    @classmethod
    def metadata_builder(cls, env): return None
    @classmethod
    def layer(cls, env, index): return None
"""

PLATFORM_SOURCE = """
from jackfield.interfaces import DeviceFacts, Platform, Probe

class World(Platform):
    name = "{name}"
    device_type = "{name}"
{body}
    @classmethod
    def facts(cls, index): return DeviceFacts("{name}")
    @classmethod
    def bind(cls, rank, config): return cls()
    device = None
    def memory(self): raise NotImplementedError
"""


def attention_source(name: str, *body: str) -> str:
    """Return a module with an attention plugin ``Backend``; ``body`` are further lines of the class."""
    return ATTENTION_SOURCE.format(name=name, body="".join(f"    {line}\n" for line in body))


def platform_source(name: str, *body: str) -> str:
    """Return a module with a platform plugin ``World``; ``body`` are further lines of the class, ``probe`` included."""
    return PLATFORM_SOURCE.format(name=name, body="".join(f"    {line}\n" for line in body))


class Site:
    """A folder of fake distributions that is on the search path while a test runs.

    Args:
        root: folder of the test; each distribution gets a folder of its own in it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: list[Path] = []
        self._modules: list[str] = []

    def add(
        self,
        distribution: str,
        points: Mapping[str, Mapping[str, str]],
        sources: Mapping[str, str] | None = None,
        version: str = "1.0",
        suffix: str = "dist-info",
        folder: str = "",
    ) -> Path:
        """Install a distribution: ``points`` by group and name, ``sources`` by module name. Returns its folder."""
        place = self.root / (folder or f"site_{len(self.folders)}")
        place.mkdir(exist_ok=True)
        if place not in self.folders:
            self.folders.append(place)
            sys.path.append(str(place))
        info = place / f"{distribution.replace('-', '_')}-{version}.{suffix}"
        info.mkdir()
        file = "METADATA" if suffix == "dist-info" else "PKG-INFO"
        (info / file).write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8")
        lines = [line for group, names in points.items() for line in _section(group, names)]
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        for module, source in (sources or {}).items():
            (place / f"{module}.py").write_text(source, encoding="utf-8")
            self._modules.append(module)
        return place

    def attention(self, name: str, *body: str, distribution: str = "", version: str = "1.0") -> None:
        """Install a distribution with one attention plugin, in module ``fake_NAME_DISTRIBUTION``."""
        owner = distribution or f"acme-{name}"
        module = f"fake_{name}_{owner}".replace("-", "_")
        source = attention_source(name, *body)
        self.add(owner, {ATTENTION: {name: f"{module}:Backend"}}, {module: source}, version)

    def platform(self, name: str, *body: str, distribution: str = "") -> None:
        """Install a distribution with one platform plugin, in module ``fake_NAME``."""
        source = platform_source(name, *body)
        self.add(distribution or f"acme-{name}", {PLATFORMS: {name: f"fake_{name}:World"}}, {f"fake_{name}": source})

    def points(self) -> list[EntryPoint]:
        """Return the entry points of the distributions of this site only."""
        found = distributions(path=[str(folder) for folder in self.folders])
        return [point for distribution in found for point in distribution.entry_points]

    def imported(self) -> list[str]:
        """Return which modules of this site were imported."""
        return [module for module in self._modules if module in sys.modules]

    def close(self) -> None:
        """Take everything off the search path again."""
        for folder in self.folders:
            sys.path.remove(str(folder))
        for module in self._modules:
            sys.modules.pop(module, None)


@contextmanager
def site_at(root: Path) -> Iterator[Site]:
    """Open a site in ``root`` and close it afterwards."""
    site = Site(root)
    try:
        yield site
    finally:
        site.close()


class FakeAttention(AttentionBackend):
    """An attention plugin of this process that serves kind ``full``; tests subclass it."""

    name: ClassVar[str] = "fake"
    kinds: ClassVar[frozenset[str]] = frozenset({"full"})
    features: ClassVar[frozenset[str]] = frozenset({"decode"})
    wish: ClassVar[Preference] = Preference()
    objections: ClassVar[tuple[Reason, ...]] = ()

    @classmethod
    def check(cls, request: Any) -> Sequence[Reason]:
        return cls.objections

    @classmethod
    def preference(cls, request: Any) -> Preference:
        return cls.wish

    @classmethod
    def cache_specs(cls, request: Any) -> Any:
        return []

    @classmethod
    def metadata_builder(cls, env: Any) -> Any:
        return None

    @classmethod
    def layer(cls, env: Any, index: int) -> Any:
        return None


class FakePlatform(Platform):
    """A platform of this process that is present; tests subclass it."""

    name: ClassVar[str] = "fake"
    dtypes: ClassVar[frozenset[str]] = ANY

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "1 device", 1)

    @classmethod
    def facts(cls, index: int) -> DeviceFacts:
        return DeviceFacts(cls.name)

    @classmethod
    def bind(cls, rank: int, config: Any) -> Platform:
        return cls()

    @property
    def device(self) -> Any:
        return None

    def memory(self) -> Any:
        return None


def attention_class(name: str, **attributes: Any) -> type[FakeAttention]:
    """Return a subclass of :class:`FakeAttention` with that name and those class attributes."""
    return type(name, (FakeAttention,), {"name": name, **attributes})


def platform_class(name: str, **attributes: Any) -> type[FakePlatform]:
    """Return a subclass of :class:`FakePlatform` with that name and those class attributes."""
    return type(name, (FakePlatform,), {"name": name, "device_type": name, **attributes})


def load_in_child(manifest: dict[str, Any], results: Any) -> None:
    """Load a manifest twice in a child process and put what was loaded into ``results``."""
    first, second = Registry.from_manifest(manifest), Registry.from_manifest(manifest)
    same = [one.require() is two.require() for one, two in zip(first.refs(), second.refs(), strict=True)]
    results.put((os.getpid(), all(same), Manifest.of(first.refs()).digest, [str(ref.state) for ref in first.refs()]))


def _section(group: str, names: Mapping[str, str]) -> list[str]:
    return [f"[{group}]", *(f"{name} = {target}" for name, target in names.items())]
