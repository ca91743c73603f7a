"""The tutorials, word for word: their files are written and their commands run, each in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "index")
FENCE = re.compile(r'^```(console|python) ?(?:title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
INSTALL = "pip install -e ."


@dataclass
class Step:
    """A command, or a file to write."""

    command: str = ""
    file: str = ""
    text: str = ""


def steps(page: str) -> Iterator[Step]:
    """Yield what a page says to do, in order."""
    for kind, title, text in FENCE.findall(page):
        if kind == "console":
            yield from (Step(command=line.removeprefix("$ ")) for line in text.splitlines() if line.startswith("$ "))
        elif title:
            yield Step(file=title, text=text)


@dataclass
class Reader:
    """Somebody who follows a page. What this environment has is there from the start; nothing is fetched."""

    folder: Path
    installed: bool = False
    changed: bool = False
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home = self.folder / ".venv"
        venv.create(self.home, symlinks=True, with_pip=False)
        site = next(self.home.glob("lib/python*/site-packages"))
        (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        for name, module in (("jackfield", "jackfield.cli"), ("pytest", "pytest"), ("pip", "pip")):
            script = self.home / "bin" / name
            script.write_text(f'#!/bin/sh\nexec "{self.home}/bin/python" -m {module} "$@"\n')
            script.chmod(0o755)

    def follow(self, step: Step) -> None:
        """Do one step; fails where it does."""
        if step.file:
            assert (self.folder / step.file).parent.is_dir()
            (self.folder / step.file).write_text(step.text)
        elif step.command.startswith("cd "):
            self.folder /= step.command.removeprefix("cd ")
        elif step.command == INSTALL:
            self._install()
        else:
            self.run(step.command)
        # Installed in place, changes would be seen at once.
        if self.installed and (step.file or step.command.startswith("sed ")):
            self._install()

    def run(self, command: str) -> None:
        """Run a command in the shell."""
        path = f"{self.home / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        self.told.append(done.stdout)

    def _install(self) -> None:
        self.run("pip install --quiet --no-deps --no-build-isolation --no-index --upgrade --force-reinstall .")
        self.installed = True


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_word_for_word(page: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    found = list(steps((DOCS / f"{page}.md").read_text()))
    before: dict[str, str] = {}
    for step in found:
        if step.command.startswith("sed "):
            before = {str(path): path.read_text() for path in reader.folder.rglob("*.py") if ".venv" not in str(path)}
        reader.follow(step)
        if step.command.startswith("sed "):
            assert any(Path(path).read_text() != text for path, text in before.items()), (
                f"changes nothing: {step.command}"
            )
    tested = [told for told in reader.told if re.search(r"\d+ passed", told)]
    assert len(tested) >= 2 and not any("failed" in told for told in tested)


def test_what_a_page_says_is_found() -> None:
    page = 'a\n\n```console\n$ one\nanswer\n$ two\n```\n\n```python\nx\n```\n\n```python title="a/b.py"\ny = 1\n```\n'
    assert list(steps(page)) == [Step(command="one"), Step(command="two"), Step(file="a/b.py", text="y = 1\n")]
    assert len(PAGES) >= 6 and INSTALL in (DOCS / "attention.md").read_text()


def test_a_step_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit 3"):
        Reader(tmp_path).run("exit 3")
