"""Plugins that were written against version 1.0 of each interface still work, unchanged."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from suites import suite

from jackfield.registry import Registry
from jackfield.testing import (
    AttentionConformance,
    DrafterConformance,
    ExpertsConformance,
    LogitsProcessorConformance,
    ModelConformance,
    OpsConformance,
    PlatformConformance,
    QuantizationConformance,
    SchedulingConformance,
)
from jackfield.testing.quantization import Stored
from jackfield.testing.tiny import Tiny, make_tiny

FROZEN = Path(__file__).with_name("frozen")
DIGESTS = FROZEN / "digests.json"


def digests() -> dict[str, str]:
    """Return the sha256 of every frozen source."""
    files = sorted(FROZEN.rglob("*.py"))
    return {str(path.relative_to(FROZEN)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def on_path(self: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let other processes find the frozen plugins, for the length of a test."""
    monkeypatch.syspath_prepend(str(FROZEN))


def frozen(name: str) -> Any:
    """Return the class of a frozen plugin."""
    if str(FROZEN) not in sys.path:
        sys.path.append(str(FROZEN))
    module = import_module(f"frozen_{name}.plugin")
    sys.path.remove(str(FROZEN))
    return getattr(module, f"Frozen{name.capitalize()}")


def lazily(name: str, heavy: str) -> Any:
    """Return the class of a frozen plugin whose heavy module is imported too, while its folder is on the path."""
    found = frozen(name)
    sys.path.append(str(FROZEN))
    import_module(f"frozen_{name}.{heavy}")
    sys.path.remove(str(FROZEN))
    return found


def pack(self: Any, weight_OI: Any) -> dict[str, Stored]:
    scale = weight_OI.float().abs().amax(1).clamp_min(1e-9) / 127
    weight = (weight_OI.float() / scale.unsqueeze(1)).round()
    return {"weight": Stored(weight.char()), "scale": Stored(scale)}


def make(self: Any, plugin: Any, folder: Path) -> Tiny:
    tiny = make_tiny(folder, "LlamaForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [plugin.name]
    (folder / "config.json").write_text(json.dumps(config))
    return tiny


OLD = {"installed": False}
TestAttention = suite(AttentionConformance, lazily("attention", "layer"), **OLD)
TestQuantization = suite(QuantizationConformance, lazily("quantization", "scheme"), **OLD, pack=pack, loss=0.01)
TestModel = suite(ModelConformance, lazily("model", "model"), **OLD, make=make)
TestDrafter = suite(DrafterConformance, frozen("drafter"), **OLD)
TestExperts = suite(ExpertsConformance, lazily("experts", "kernels"), **OLD)
TestOps = suite(OpsConformance, lazily("ops", "functions"), **OLD)
TestScheduling = suite(SchedulingConformance, frozen("scheduling"), **OLD)
TestLogits = suite(LogitsProcessorConformance, frozen("logits"), **OLD, extra_args={"frozen_logits": [3, 7]})
TestPlatform = suite(PlatformConformance, frozen("platform"), **OLD, on_path=pytest.fixture(autouse=True)(on_path))


def test_they_are_as_they_were() -> None:
    assert digests() == json.loads(DIGESTS.read_text()), "frozen plugins are never edited; add new ones beside them"


def test_they_are_found_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FROZEN))
    points = [point for found in distributions(path=[str(FROZEN)]) for point in found.entry_points]
    refs = Registry.discover(entry_points=points).refs()
    assert len(refs) == 10
    assert [ref.sentence() for ref in refs if ref.load_object() is None] == []
    assert {ref.require().api for ref in refs if ref.family != "hooks"} == {(1, 0)}


if __name__ == "__main__":
    DIGESTS.write_text(json.dumps(digests(), indent=1) + "\n", encoding="utf-8")
