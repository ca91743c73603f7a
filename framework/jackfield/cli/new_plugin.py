"""``jackfield new-plugin``: a distribution with a plugin that works, its conformance tests, README and CI file."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

TEMPLATES = Path(__file__).with_name("templates")
HOOKS = "hooks"
WORDS: Mapping[str, str] = {
    "attention": "attention_backends",
    "quantization": "quantization_methods",
    "model": "models",
    "drafter": "drafters",
    "experts": "moe_experts",
    "moe": "moe_experts",
    "op": "ops",
    "scheduling": "scheduling_policies",
    "policy": "scheduling_policies",
    "logits": "logits_processors",
    "platform": "platforms",
    "hook": HOOKS,
}
"""Shorter words for families."""
USAGE: Mapping[str, str] = {
    "attention_backends": "`jackfield generate MODEL TEXT --attention.force {plugin}`",
    "quantization_methods": 'a checkpoint with `"quant_method": "{plugin}"` in its `quantization_config` chooses it.',
    "models": "a checkpoint whose `architectures` names `{plugin}` chooses it.",
    "drafters": "`jackfield generate MODEL TEXT --speculative.method {plugin}`",
    "moe_experts": "`jackfield generate MODEL TEXT --moe.force {plugin}`",
    "ops": "`jackfield generate MODEL TEXT --ops.kinds.rms_norm.force {plugin}`",
    "scheduling_policies": "`jackfield generate MODEL TEXT --policy {plugin}`",
    "logits_processors": "`jackfield serve MODEL --sampling.logits-processors {plugin}`",
    "platforms": "`jackfield generate MODEL TEXT --platform.force {plugin}`",
    HOOKS: "it listens wherever it is installed; `--plugins.disable {plugin}` keeps it out.",
}
"""How users turn a plugin on."""
_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Names:
    """What a new plugin is called.

    Args:
        distribution: on package indexes. package: import name. plugin: entry point and class variable ``name``.
        class_: of the plugin. title: in sentences. group: of the entry point.
    """

    distribution: str
    package: str
    plugin: str
    class_: str
    title: str
    group: str

    def fill(self, text: str, family: str) -> str:
        """Return a template with the names in it."""
        words = {
            "distribution": self.distribution,
            "package": self.package,
            "plugin": self.plugin,
            "Class": self.class_,
            "title": self.title,
            "group": self.group,
            "usage": USAGE[family].format(plugin=self.plugin),
        }
        for word, value in words.items():
            text = text.replace(f"@{word}@", value)
        return text


def new_plugin(family: str, name: str, /, *, output: Path | None = None) -> int:
    """Write a new distribution with a plugin that works, its tests, a README and a CI file.

    Parameters
    ----------
    family
        attention, quantization, model, drafter, experts, ops, scheduling, logits, platform or hook.
    name
        Of the distribution, in lower case with dashes: acme-rocket.
    output
        Folder to write to; ./NAME when left out.
    """
    found = family_of(family)
    names = names_of(found, name)
    folder = Path(names.distribution) if output is None else output
    written = write_plugin(found, names, folder)
    for path in written:
        print(path)
    print(f"\nnext:\n  pip install -e '{folder}[test]'\n  pytest {folder}")
    return 0


def family_of(word: str) -> str:
    """Return the family that a word means.

    Raises:
        ConfigError: there is no such family.
    """
    from jackfield.errors import ConfigError, did_you_mean
    from jackfield.interfaces import FAMILIES

    known = (*FAMILIES, HOOKS)
    found = word.lower().replace("-", "_")
    found = WORDS.get(found, found)
    if found not in known:
        remedy = f"{did_you_mean(found, {*known, *WORDS})} families: {', '.join(known)}".strip()
        raise ConfigError(f"there is no family '{word}'", field="family", value=word, remedy=remedy)
    return found


def names_of(family: str, name: str) -> Names:
    """Return all names that follow from the distribution's.

    Raises:
        ConfigError: the name cannot be one, or its package would hide one that is installed.
    """
    from jackfield.errors import ConfigError
    from jackfield.interfaces import FAMILIES, HOOK_GROUP

    package = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(package):
        remedy = "use lower-case letters, digits and dashes, a letter first: acme-rocket"
        raise ConfigError(f"'{name}' cannot be a distribution's name", field="name", value=name, remedy=remedy)
    if find_spec(package) is not None:
        remedy = "choose another name, with yours in front: acme-rocket"
        raise ConfigError(f"a package '{package}' is installed already", field="name", value=name, remedy=remedy)
    class_ = "".join(part.capitalize() for part in name.split("-"))
    plugin = f"{class_}ForCausalLM" if family == "models" else package
    group = HOOK_GROUP if family == HOOKS else FAMILIES[family].group
    return Names(name, package, plugin, class_, name.replace("-", " ").capitalize(), group)


def write_plugin(family: str, names: Names, folder: Path) -> list[Path]:
    """Write the distribution and return its files.

    Raises:
        ConfigError: the folder has files already.
    """
    from jackfield.errors import ConfigError

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        remedy = "name another folder with --output, or empty it"
        raise ConfigError(f"{folder} is not empty", field="output", value=str(folder), remedy=remedy)
    written = []
    for target, template in sorted(_files(family, names.package).items()):
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "" if template is None else template.read_text(encoding="utf-8")
        path.write_text(names.fill(text, family), encoding="utf-8")
        written.append(path)
    return written


def _files(family: str, package: str) -> dict[str, Path | None]:
    """Return the template of each file, None for one that is empty."""
    common, source = TEMPLATES / "common", f"src/{package}"
    found: dict[str, Path | None] = {
        "pyproject.toml": common / "pyproject.toml.txt",
        "README.md": common / "README.md.txt",
        ".gitignore": common / "gitignore.txt",
        ".github/workflows/tests.yml": common / "ci.yml.txt",
        f"{source}/__init__.py": common / "init.py.txt",
        f"{source}/py.typed": None,
        f"tests/test_{package}_packaging.py": common / "test_packaging.py.txt",
        f"tests/test_{package}.py": TEMPLATES / family / "test.py.txt",
    }
    modules = [path for path in (TEMPLATES / family).glob("*.py.txt") if path.name != "test.py.txt"]
    return found | {f"{source}/{path.name.removesuffix('.txt')}": path for path in modules}
