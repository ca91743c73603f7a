"""The report of a whole pipeline: without torch, as JSON and back, compared with another, and as a manifest."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import load_in_child

from jackfield.checkpoint import read_facts
from jackfield.cli import main
from jackfield.config import load_config
from jackfield.errors import ConfigError
from jackfield.interfaces import DeviceFacts, TextConfig
from jackfield.oracle import DecisionReport, diff
from jackfield.oracle.pipeline import Bench, _dtype, resolve
from jackfield.registry import Registry
from oracle_pipeline.bench import CONFIG, facts, run

FAMILIES = [
    "platforms",
    "models",
    "quantization_methods",
    "attention_backends",
    "ops",
    "drafters",
    "scheduling_policies",
]
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.config.load.process_environment", dict)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_explain_needs_no_torch(folder: Path, flags: list[str]) -> None:
    code = (
        "import contextlib, io, json, sys\n"
        "from jackfield.cli import main\n"
        "out = io.StringIO()\n"
        "with contextlib.redirect_stdout(out):\n"
        "    code = main(['explain', *json.loads(sys.argv[1])])\n"
        "heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]\n"
        "print(json.dumps([code, 'torch_sdpa' in out.getvalue(), heavy]))"
    )
    line = [str(folder), "--platform", "cpu", "--speculative.method", "ngram", *flags]
    command = [sys.executable, "-c", code, json.dumps(line), json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [0, True, []]


def test_families_are_decided_in_order() -> None:
    report = run(speculative={"method": "ngram"}).report
    assert list(dict.fromkeys(decision.family for decision in report.decisions)) == FAMILIES
    assert report.summary() == "cpu · LlamaForCausalLM · unquantized · torch_sdpa · ops torch · drafter ngram"


def test_states_follow_the_decisions() -> None:
    resolution = run(without=())
    states = {v.name: str(v.ref.state) for d in resolution.report.decisions for v in d.verdicts if v.ref is not None}
    assert (states["cpu"], states["torch_sdpa"]) == ("active", "active")
    assert states["Qwen2ForCausalLM"] == "loaded"


def test_json_round_trip() -> None:
    report = run(block_size=8, speculative={"method": "ngram"}).report
    read = DecisionReport.from_json(report.to_json())
    assert read.to_dict() == json.loads(report.to_json())
    assert read.render(width=200) == report.render(width=200)
    assert diff(report, read) == []


def test_diff_names_what_changed() -> None:
    lines = diff(run().report, run(block_size=8, platform="cpu").report)
    assert lines == [
        "platforms for target (devices): auto -> forced",
        "proposal cache.block_size: 32 (applied) -> 32 (not applied)",
    ]


def explain_to(file: Path, capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(["explain", *line, "--json"]) == 0
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    return str(file)


def test_explain_diff(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(folder)
    # What compiles at first use is no candidate on machines without a compiler.
    plain = ("--platform", "cpu", "--attention.exclude", "native_cpu")
    first = explain_to(folder / "a.json", capsys, model, *plain)
    same = explain_to(folder / "b.json", capsys, model, *plain)
    other = explain_to(folder / "c.json", capsys, model, *plain, "--attention.force", "torch_sdpa")
    assert main(["explain", "--diff", first, same]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["explain", "--diff", first, other]) == 0
    assert capsys.readouterr().out == "attention_backends for target, full: auto -> forced\n"


def test_explain_diff_of_something_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(folder / "config.json")
    assert main(["explain", "--diff", config, config]) == 2
    assert "field: schema_version = None" in capsys.readouterr().err
    assert main(["explain", "--diff", config, str(folder / "absent.json")]) == 2
    assert capsys.readouterr().err.startswith("error: cannot read a report: ")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_child_loads_what_was_decided(folder: Path, method: str) -> None:
    words = {"platform": "cpu", "attention": "torch_sdpa", "speculative": {"method": "ngram"}}
    config = load_config(env={}, api={"model": str(folder), **words})
    registry = Registry.discover(config.plugins)
    decisions = resolve(config, read_facts(folder), registry).report.decisions
    manifest = registry.manifest([decision.ref for decision in decisions], for_spawn=True)
    assert {entry.name for entry in manifest.plugins} >= {"cpu", "LlamaForCausalLM", "torch_sdpa", "ngram"}
    context: Any = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    child = context.Process(target=load_in_child, args=(manifest.to_dict(), results))
    child.start()
    child.join(60)
    pid, same, digest, states = results.get()
    assert (pid, same, digest) == (child.pid, True, manifest.digest)
    assert set(states) == {"loaded"}


def test_overlap_and_a_drafter_on_the_host() -> None:
    with pytest.raises(ConfigError) as caught:
        run(speculative={"method": "ngram"}, async_scheduling=True)
    assert caught.value.message == (
        "overlapped scheduling cannot be used with a drafter on the host, where rounds are not recorded"
    )
    assert (caught.value.field, caught.value.value) == ("scheduler.async_scheduling", True)


def test_a_step_without_chunks_holds_a_whole_prompt() -> None:
    assert run(enable_chunked_prefill=False).config.scheduler.max_num_batched_tokens == 2048
    with pytest.raises(ConfigError) as caught:
        run(enable_chunked_prefill=False, max_num_batched_tokens=256)
    assert caught.value.message == "without chunked prefill a step must hold a whole prompt of 512 tokens"
    assert caught.value.remedy == "use 512 or more, or leave chunked prefill on"


def test_derived_values_say_where_they_come_from() -> None:
    config = run().config
    assert (config.model.max_model_len, config.cache.cache_dtype, config.model.dtype) == (512, "float32", "float32")
    assert str(config.origin("model.max_model_len")).startswith("derived")
    assert str(config.origin("model.dtype")).startswith("proposal")


@pytest.mark.parametrize(
    ("device", "container", "stored", "dtype", "why"),
    [
        ("cpu", "safetensors", "bfloat16", "bfloat16", "the checkpoint's own type"),
        ("cpu", "safetensors", "", "float32", "the usual type of a CPU"),
        ("cpu", "gguf", "float16", "float32", "the usual type of a CPU"),
        ("npu", "gguf", "float16", "float16", "the checkpoint's own type"),
        ("npu", "gguf", "", "bfloat16", "the usual type of an accelerator"),
    ],
)
def test_the_type_to_compute_in(device: str, container: str, stored: str, dtype: str, why: str) -> None:
    bench = Bench(load_config(env={}, api={"model": "model"}), Registry())
    given = replace(facts(), container=container, dtype=stored)
    sizes = TextConfig(vocab_size=8, hidden_size=8, num_layers=1, max_position=8)
    assert _dtype(bench, given, sizes, DeviceFacts(type=device)) == dtype == bench.config.model.dtype
    assert why in str(bench.config.origin("model.dtype"))
