"""What authors of plugins and people who swap backends asked of engines like this one: one test for each requirement.

Thin on purpose: the parts have tests of their own, here the real thing is exercised once from outside.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from jackfield import LLM, SamplingParams
from jackfield.cli import main
from jackfield.cli.new_plugin import TEMPLATES
from jackfield.config import load_config
from jackfield.errors import ConfigError, JackfieldError, NoCandidateError
from jackfield.interfaces import FAMILIES, AttentionRequest, DeviceFacts, Plugin
from jackfield.oracle.judge import judge
from jackfield.registry import Manifest, PluginRef, PluginState, Registry, known_distributions
from jackfield.testing import __all__ as kit
from jackfield.testing.attention_shapes import attention_samples
from jackfield.testing.child import HEAVY, ask
from jackfield.testing.tiny import Tiny, make_tiny

SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory": "16MiB", "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7]]
BROKEN = """
from jackfield.interfaces import Platform
raise RuntimeError("the driver is of another version")
"""
UNSELECTED = """
from jackfield.interfaces import Band, Preference, AttentionBackend
class Backend(AttentionBackend):
    name, summary, kinds = "bystander", "never chosen", frozenset({"full"})
    features = frozenset({"prefill", "chunked_prefill", "decode", "mixed", "gqa"})
    @classmethod
    def preference(cls, request): return Preference(Band.FALLBACK, "never")
    @classmethod
    def cache_specs(cls, request): return []
    @classmethod
    def metadata_builder(cls, env): raise AssertionError
    @classmethod
    def layer(cls, env, index): raise AssertionError
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A model whose layers are of two kinds."""
    types = ["full_attention", "sliding_attention", "full_attention"]
    values: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "layer_types": types}
    return make_tiny(tmp_path_factory.mktemp("windows"), "Qwen2ForCausalLM", **values)


class Strangers:
    """Distributions of others, on the search path for the length of a test."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._patch = root, monkeypatch
        self.modules: list[str] = []

    def add(self, name: str, group: str, points: dict[str, str], sources: dict[str, str] | None = None) -> None:
        """Install one."""
        place = self._root / name
        info = place / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[{group}]", *(f"{point} = {target}" for point, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for module, text in (sources or {}).items():
            (place / f"{module}.py").write_text(text)
            self.modules.append(module)
        self._patch.syspath_prepend(str(place))


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Strangers]:
    made = Strangers(tmp_path, monkeypatch)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)


def generate(tiny: Tiny, **settings: Any) -> tuple[list[list[int]], LLM]:
    """Return tokens, and the engine that made them, which is shut down."""
    llm = LLM(str(tiny.folder), **{**SETTINGS, **settings})
    try:
        return [list(r.outputs[0].token_ids) for r in llm.generate([list(p) for p in PROMPTS], GREEDY)], llm
    finally:
        llm.shutdown()


def chosen(llm: LLM, family: str) -> list[str]:
    return [decision.name for decision in llm.report.decisions if decision.family == family]


def test_requirement_01_a_platform_that_fails_is_never_swallowed(strangers: Strangers, tiny: Tiny) -> None:
    strangers.add("acme-chip", FAMILIES["platforms"].group, {"chip": "acme_chip:Chip"}, {"acme_chip": BROKEN})
    with pytest.raises(JackfieldError) as caught:
        generate(tiny)
    assert "RuntimeError: the driver is of another version" in str(caught.value) and "acme-chip 1.0" in str(
        caught.value
    )
    tokens, llm = generate(tiny, platform="cpu")
    assert tokens and chosen(llm, "platforms") == ["cpu"]
    ref = Registry.discover().get("platforms", "chip")
    assert ref.load() is None and ref.error is not None and "acme_chip.py" in ref.error.traceback


def test_requirement_02_the_contract_is_checked_from_metadata(strangers: Strangers) -> None:
    source = {"acme_new": "raise AssertionError('imported')"}
    strangers.add("acme", "jackfield.attention_backends.v9", {"rocket": "acme_new:Rocket"}, source)
    ref = Registry.discover().get("attention_backends", "rocket")
    assert "acme_new" not in sys.modules
    offered = "{}.{}".format(*FAMILIES["attention_backends"].version)
    assert ref.sentence() == (
        f"plugin rocket (acme 1.0) could not be loaded: needs attention_backends API 9, this core offers {offered}"
    )
    assert main(["plugins"]) == 0 and main(["--help"]) == 0


def test_requirement_03_what_was_chosen_and_rejected_is_told(windows: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(windows.folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    attention = [d for d in report["decisions"] if d["family"] == "attention_backends"]
    assert [d["request"]["kind"] for d in attention] == ["full", "sliding"]
    for decision in report["decisions"]:
        assert decision["chosen"]["name"]
        for verdict in decision["verdicts"]:
            assert verdict["stage"] == "accepted" or all(r["code"] and r["detail"] for r in verdict["reasons"])


def test_requirement_04_an_explicit_choice_is_used_or_an_error(tiny: Tiny) -> None:
    _, llm = generate(tiny, attention="torch_sdpa")
    assert set(chosen(llm, "attention_backends")) == {"torch_sdpa"}
    with pytest.raises(NoCandidateError) as caught:
        generate(tiny, attention="torch_mamba")
    assert caught.value.field == "attention.force" and "torch_sdpa" in caught.value.table
    _, llm = generate(tiny, attention={"prefer": ["torch_mamba", "torch_sdpa"]})
    (decision,) = [d for d in llm.report.decisions if d.family == "attention_backends"]
    assert decision.name == "torch_sdpa" and "torch_mamba" in decision.fallback


def test_requirement_05_every_process_has_the_same_plugins_once(tiny: Tiny) -> None:
    _, llm = generate(tiny)
    manifest = llm._prepared.manifest()
    told = ask(json.dumps(manifest.to_dict()), HEAVY)
    assert (told.error, told.once, told.digest) == ("", True, manifest.digest)


def test_requirement_06_choosing_imports_and_changes_nothing(tiny: Tiny) -> None:
    code = (
        "import logging, multiprocessing, os, sys\n"
        "before = dict(os.environ), list(logging.root.handlers), multiprocessing.get_start_method(allow_none=True)\n"
        "from jackfield.cli import main\n"
        "assert main(['explain', sys.argv[1], '--json']) == 0\n"
        "after = dict(os.environ), list(logging.root.handlers), multiprocessing.get_start_method(allow_none=True)\n"
        "assert before == after\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny.folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_requirement_07_an_unselected_plugin_changes_nothing(strangers: Strangers, tiny: Tiny) -> None:
    before, first = generate(tiny)
    points, sources = {"bystander": "bystander:Backend"}, {"bystander": UNSELECTED}
    strangers.add("acme", FAMILIES["attention_backends"].group, points, sources)
    after, second = generate(tiny)
    assert before == after
    names = [[d.name for d in llm.report.decisions] for llm in (first, second)]
    assert names[0] == names[1]
    verdicts = next(d for d in second.report.decisions if d.family == "attention_backends").verdicts
    assert "bystander" in {verdict.name for verdict in verdicts}


def test_requirement_08_names_are_open_and_have_one_owner(strangers: Strangers) -> None:
    group, points = FAMILIES["attention_backends"].group, {"rocket": "bystander:Backend"}
    for owner in ("acme", "zenith"):
        strangers.add(owner, group, points)
    refs = [ref for ref in Registry.discover().refs("attention_backends") if ref.name == "rocket"]
    assert {ref.state for ref in refs} == {PluginState.FAILED}
    assert refs[0].error is not None and "acme 1.0 and zenith 1.0" in refs[0].error.message
    rules = load_config(env={}, api={"plugins.override": {"attention_backends.rocket": "zenith"}}).plugins
    found = Registry.discover(rules)
    assert found.get("attention_backends", "rocket").distribution == "zenith"


def test_requirement_09_choices_come_from_what_is_installed(tiny: Tiny) -> None:
    for setting in ({"attention": "torch_sdp"}, {"policy": "fcsf"}, {"speculative.method": "ngramm"}):
        with pytest.raises(JackfieldError) as caught:
            generate(tiny, **setting)
        assert "did you mean" in str(caught.value)


def test_requirement_10_what_is_not_declared_is_absent() -> None:
    class Empty(Plugin):
        name = "empty"

    assert not (Empty.kinds | Empty.features) and not Empty.requires
    ref = PluginRef("attention_backends", "empty", "acme", "1.0", "m:Empty")
    ref.adopt(Empty)
    for request in attention_samples().values():
        assert not judge(ref, request).accepted
    sdpa = Registry.discover().get("attention_backends", "torch_sdpa")
    verdict = judge(sdpa, AttentionRequest(kind="full", needs=frozenset({"of_next_year"}), device=DeviceFacts("cpu")))
    assert [reason.code for reason in verdict.reasons] == ["feature"]


def test_requirement_11_a_backend_for_each_kind_layer_and_phase(windows: Tiny) -> None:
    whole, _ = generate(windows, attention="torch_sdpa")
    words: list[dict[str, Any]] = [
        {"kinds": {"sliding": "torch_sdpa"}},
        {"layers": {"1": "torch_sdpa"}},
        {"phases": {"prefill": "torch_sdpa", "decode": "torch_sdpa"}},
    ]
    for word in words:
        assert generate(windows, attention=word)[0] == whole
    with pytest.raises(ConfigError):
        generate(windows, attention={"kinds": {"slidding": "torch_sdpa"}})


def test_requirement_12_user_values_stay_and_configuration_is_frozen(tiny: Tiny) -> None:
    _, llm = generate(tiny, block_size=48, dtype="float32")
    assert (llm.config.cache.block_size, llm.config.is_user_set("cache.block_size")) == (48, True)
    with pytest.raises(Exception, match="frozen"):
        llm.config.cache.block_size = 16  # type: ignore[misc]


def test_requirement_13_options_have_a_schema(tiny: Tiny) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(tiny, **{"speculative.method": "ngram", "plugins.options.ngram.min_m": 2})
    assert "did you mean 'min_n'" in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        load_config(env={"VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    assert "attention" in str(caught.value)


def test_requirement_14_the_kit_is_installed() -> None:
    families = {"platforms": "Platform", "models": "Model", "quantization_methods": "Quantization"}
    families |= {"moe_experts": "Experts", "attention_backends": "Attention", "ops": "Ops", "drafters": "Drafter"}
    families |= {"scheduling_policies": "Scheduling", "logits_processors": "LogitsProcessor"}
    assert families.keys() == FAMILIES.keys()
    assert {f"{name}Conformance" for name in (*families.values(), "Hooks", "Packaging")} <= set(kit)
    points = {point.name: point.value for point in distribution("jackfield").entry_points.select(group="pytest11")}
    assert points == {"jackfield": "jackfield.testing.pytest_plugin"}


def test_requirement_15_torch_is_never_pinned_and_digests_hold_versions(tiny: Tiny) -> None:
    (torch,) = [Requirement(text) for text in requires("jackfield") or () if Requirement(text).name == "torch"]
    assert {part.operator for part in torch.specifier} <= {">=", "<"}
    _, llm = generate(tiny)
    manifest = llm._prepared.manifest()
    newer = [PluginRef(p.family, p.name, p.distribution, "99", p.target) for p in manifest.plugins]
    assert Manifest.of(newer).digest != manifest.digest
    text = (TEMPLATES / "common" / "pyproject.toml.txt").read_text()
    assert 'dependencies = ["jackfield"]' in text


def test_requirement_16_plugins_are_small_and_missing_ones_are_named(tiny: Tiny, tmp_path: Path) -> None:
    sources = (TEMPLATES / "attention_backends").glob("*.txt")
    lines = sum(len(path.read_text().splitlines()) for path in sources if path.name != "test.py.txt")
    assert lines <= 100
    table = tmp_path / "known.json"
    table.write_text(json.dumps({"drafters": {"rocket": [{"name": "acme", "pip": "pip install acme"}]}}))
    found = known_distributions("drafters", "rocket", table)
    assert found is not None and found[0].pip == "pip install acme"
