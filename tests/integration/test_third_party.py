"""The example as a stranger has it: a wheel, installed into a fresh environment, used, and uninstalled again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import CPU_ATTENTION
from hf import Tiny, assert_equal, random_prompts

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_plugin"
NAMES = ["rocket", "rocket_rows"]
OTHERS = ["rocket_host", "RocketForCausalLM", "rocket_int8", "rocket_echo", "rocket_audit"]
LIGHT = [f"acme_rocket.{name}" for name in ("audit", "backend", "host", "int8", "model")]
"""What is imported when an engine chooses and nothing of the example is named: hooks listen, and candidates of the
families that a Llama needs are asked. No drafter was asked for.
"""
PROMPTS = random_prompts((1, 9, 40, 77))

DRIVER = """
import json, sys
from jackfield import LLM, SamplingParams

model, prompts, words = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
runs = []
for settings in words:
    llm = LLM(model, skip_tokenizer_init=True, kv_cache_memory="16MiB", **settings)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    names = [d.name for d in llm.report.decisions if d.family == "attention_backends"]
    runs.append({"tokens": [o.outputs[0].token_ids for o in outputs], "backends": names})
modules = sorted(name for name in sys.modules if name.startswith("acme"))
print(json.dumps({"runs": runs, "modules": modules}))
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees this environment's packages, and what one can do with it."""

    folder: Path
    wheel: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *arguments: str) -> bytes:
        """Run Python with ``arguments`` in an empty folder and return its stdout; fails with its stderr."""
        environment = {"HOME": str(self.folder), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [self.python, *arguments], capture_output=True, cwd=self.folder, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def jackfield(self, *arguments: str) -> bytes:
        """Run the command line."""
        return self.run("-m", "jackfield.cli", *arguments)

    def drive(self, model: Tiny, *words: dict[str, Any]) -> dict[str, Any]:
        """Generate with each of the settings, in one process."""
        told: dict[str, Any] = json.loads(
            self.run("-c", DRIVER, str(model.folder), json.dumps(PROMPTS), json.dumps(words))
        )
        return told

    def plugins(self, *flags: str) -> dict[str, dict[str, Any]]:
        """Return the rows of the example's plugins."""
        rows = json.loads(self.jackfield("plugins", "--json", *flags))
        return {row["name"]: row for row in rows if row["distribution"] == "acme-rocket"}

    def pip(self, *arguments: str) -> None:
        """Run this environment's pip on that one."""
        pip(["--python", self.python, *arguments])

    def install(self) -> None:
        self.pip("install", "--no-deps", "--no-index", str(self.wheel))

    def uninstall(self) -> None:
        self.pip("uninstall", "--yes", "acme-rocket")


def pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Build the wheel, and make an environment that has not installed it."""
    root = tmp_path_factory.mktemp("third_party")
    shutil.copytree(EXAMPLE, root / "source")
    pip(["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root / "wheels"), str(root / "source")])
    (wheel,) = (root / "wheels").glob("*.whl")
    venv.create(root / "venv", with_pip=False)
    environment = Environment(root / "venv", wheel)
    site = environment.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").decode().strip()
    # addsitedir, and not the bare path: the packages here may themselves be reached through .pth files.
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(site) / "outer.pth").write_text(line)
    return environment


@pytest.fixture
def installed(fresh: Environment) -> Iterator[Environment]:
    fresh.install()
    yield fresh
    fresh.uninstall()


def test_wheel_holds_the_package_and_nothing_else(fresh: Environment) -> None:
    import zipfile

    names = zipfile.ZipFile(fresh.wheel).namelist()
    modules = {name for name in names if ".dist-info/" not in name}
    names = ("__init__", "backend", "layer", "int8", "int8_scheme", "model", "model_modules", "echo", "host", "audit")
    assert modules == {f"acme_rocket/{name}.py" for name in names}


def test_chosen_by_configuration_it_generates_the_reference(installed: Environment, text_model: Tiny) -> None:
    told = installed.drive(
        text_model,
        {"attention.force": "rocket"},
        {"attention": "rocket_rows"},
        {"attention.phases.prefill.force": "rocket", "attention.phases.decode.force": "torch_sdpa"},
        {"attention.layers": {"1": "rocket"}},
        {"attention.force": "torch_sdpa"},
    )
    assert [run["backends"] for run in told["runs"]] == [
        ["rocket"],
        ["rocket_rows"],
        ["rocket", "torch_sdpa"],
        [CPU_ATTENTION, "rocket"],
        ["torch_sdpa"],
    ]
    assert told["modules"] == sorted(["acme_rocket", *LIGHT, "acme_rocket.layer"])
    for run in told["runs"]:
        assert_equal(text_model.model, PROMPTS, run["tokens"])


def test_drafter_and_platform_by_configuration(installed: Environment, text_model: Tiny) -> None:
    told = installed.drive(text_model, {"speculative.method": "rocket_echo"}, {"platform": "rocket_host"})
    assert "acme_rocket.echo" in told["modules"]
    for run in told["runs"]:
        assert_equal(text_model.model, PROMPTS, run["tokens"])


def test_not_chosen_it_changes_nothing_and_stays_light(fresh: Environment, text_model: Tiny) -> None:
    line = ["generate", str(text_model.folder), "Hello", "--temperature", "0", "--max-tokens", "24"]
    before, told_before = fresh.jackfield(*line), fresh.drive(text_model, {})
    fresh.install()
    try:
        after, told_after = fresh.jackfield(*line), fresh.drive(text_model, {})
    finally:
        fresh.uninstall()
    assert len(before) > 1
    assert after == before
    assert told_after["runs"] == told_before["runs"]
    assert told_before["modules"] == []
    assert told_after["modules"] == ["acme_rocket", *LIGHT]


@pytest.mark.parametrize("setting", ["attention.exclude", "plugins.disable"])
def test_excluded_or_disabled_nothing_of_it_is_imported(installed: Environment, text_model: Tiny, setting: str) -> None:
    told = installed.drive(text_model, {setting: NAMES})
    assert "acme_rocket.backend" not in told["modules"]
    assert installed.drive(text_model, {"plugins.disable": [*NAMES, *OTHERS]})["modules"] == []
    assert told["runs"][0]["backends"] == [CPU_ATTENTION]


def test_it_has_its_rows_and_its_verdicts(installed: Environment, text_model: Tiny) -> None:
    rows = installed.plugins()
    assert sorted(rows) == sorted([*NAMES, *OTHERS])
    assert {row["state"] for row in rows.values()} == {"loaded"}
    assert rows["rocket"] == {
        "family": "attention_backends",
        "name": "rocket",
        "distribution": "acme-rocket",
        "version": "0.1.0",
        "state": "loaded",
        "api": "1.0",
        "code": "",
        "reason": "",
        "summary": "an example: plain torch, one sequence after another",
    }
    rows = installed.plugins("--plugins.disable", ",".join([*NAMES, *OTHERS]))
    assert {row["state"] for row in rows.values()} == {"disabled"}
    verdicts = explained(installed, text_model)
    assert verdicts["rocket"]["stage"] == verdicts["rocket_rows"]["stage"] == "accepted"
    forced = installed.jackfield("explain", str(text_model.folder), "--json", "--attention.force", "rocket")
    (decision,) = attention(json.loads(forced))
    assert (decision["chosen"]["name"], decision["how"], decision["setting"]) == (
        "rocket",
        "forced",
        "attention.force",
    )
    assert installed.jackfield("plugins", "check", "rocket")


def test_uninstalled_nothing_remains(fresh: Environment, text_model: Tiny) -> None:
    fresh.install()
    assert sorted(fresh.plugins()) == sorted([*NAMES, *OTHERS])
    fresh.uninstall()
    assert fresh.plugins() == {}
    assert NAMES[0] not in explained(fresh, text_model)
    assert list(fresh.folder.rglob("*acme*")) == []


def test_its_own_tests_pass(installed: Environment) -> None:
    tests = installed.folder / "example_tests"
    shutil.copytree(EXAMPLE / "tests", tests)
    told = installed.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)).decode()
    assert " passed" in told and "failed" not in told and "skipped" not in told


def attention(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [decision for decision in report["decisions"] if decision["family"] == "attention_backends"]


def explained(environment: Environment, model: Tiny) -> dict[str, dict[str, Any]]:
    """Return the verdicts on attention backends, by name, as ``explain`` tells them."""
    (decision,) = attention(json.loads(environment.jackfield("explain", str(model.folder), "--json")))
    return {verdict["name"]: verdict for verdict in decision["verdicts"]}
