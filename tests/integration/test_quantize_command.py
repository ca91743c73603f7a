"""``jackfield quantize``: what it writes is what the engine computes with, and what compressed-tensors reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from quantized_models import PARTS, save, tiny
from quantized_models import said as answers
from safetensors.torch import load_file

from jackfield.cli import main
from jackfield_quantization.online_schemes import CONVERSIONS, encode


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama") / "source")


def library_reads(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of all packed modules, decoded by the compressed-tensors library."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(**json.loads((folder / "config.json").read_text())["quantization_config"])
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = tensor
    packed = {module: state for module, state in modules.items() if "weight_scale" in state}
    return {module: compressor.decompress(dict(state), scheme)["weight"] for module, state in packed.items()}


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "mxfp8", "nvfp4"])
def test_what_is_written_is_what_is_computed_with(engine: Engine, source: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "made"
    assert main(["quantize", str(source), "--output", str(folder), "--format", name]) == 0
    read = library_reads(folder)
    assert len(read) == 2 * len(PARTS)
    weights = load_file(source / "model.safetensors")
    for module, weight in read.items():
        own = weights[f"{module}.weight"]
        if name in CONVERSIONS:
            expected = CONVERSIONS[name].decode(encode(own, CONVERSIONS[name]))
        else:
            scale = own.abs().amax(1, keepdim=True) / 448
            expected = (own / scale).to(torch.float8_e4m3fn).float() * scale
        # The library decodes in the type of the scales: float16 for blocks of whole numbers; nvfp4 in bfloat16.
        close = 2.0**-8 if name == "nvfp4" else 2e-3
        torch.testing.assert_close(weight.float(), expected, rtol=close, atol=1e-4)
    left, right = engine(folder, max_model_len=128), engine(source, max_model_len=128, quantization={"force": name})
    chosen = next(d.ref.name for d in left.report.decisions if d.family == "quantization_methods")
    assert chosen in ("compressed_tensors", "native_compressed_tensors")
    for (_, places), (_, others) in zip(answers(left), answers(right), strict=True):
        # Greedy tokens may part where two are equally likely; the first place depends on no token before.
        assert places[0] == pytest.approx(others[0], abs=0.02)


def test_what_is_overridden_is_written(source: Path, tmp_path: Path) -> None:
    flags = ["--hf-overrides", json.dumps({"max_position_embeddings": 77})]
    assert main(["quantize", str(source), "--output", str(tmp_path / "made"), "--format", "int8", *flags]) == 0
    assert json.loads((tmp_path / "made" / "config.json").read_text())["max_position_embeddings"] == 77


def test_layers_that_stay_plain_are_listed(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    flags = ["--plugins.options.mxfp8.only", "mlp"]
    assert main(["quantize", str(source), "--output", str(folder), "--format", "mxfp8", *flags]) == 0
    listed = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    expected = [f"model.layers.{i}.self_attn.{part}" for i in range(2) for part in PARTS[:4]]
    assert sorted(listed) == sorted([*expected, "model.embed_tokens", "lm_head"])
    assert sorted(library_reads(folder)) == sorted(
        f"model.layers.{i}.mlp.{part}" for i in range(2) for part in PARTS[4:]
    )


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command says when it ends with a user's error."""
    assert main(["quantize", *words]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_written_is_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ("--output", str(tmp_path / "made"))
    said = refused(
        capsys, str(source), *output, "--format", "gptq", "--plugins.options.calibrated_gptq.group_size", "32"
    )
    assert "needs a text to calibrate with" in said and "--text" in said
    said = refused(capsys, str(source), *output, "--format", "awq", "--plugins.options.calibrated_awq.group_size", "32")
    assert "'awq' needs a text to calibrate with" in said and "--text" in said
    said = refused(capsys, str(source), *output, "--format", "awq", "--plugins.options.calibrated_awq.bits", "8")
    assert "plugins.options.calibrated_awq.bits" in said and "8" in said
    said = refused(capsys, str(source), *output, "--format", "awq", "--text", str(source / "config.json"))
    assert "no whole groups" in said and "plugins.options.calibrated_awq.group_size" in said and "128" in said
    text = str(source / "config.json")
    assert "looks at no text" in refused(capsys, str(source), *output, "--format", "int8", "--text", text)
    assert "writes no checkpoints" in refused(capsys, str(source), *output, "--format", "nf4")
    assert "did you mean" in refused(capsys, str(source), *output, "--format", "int9")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("x")
    assert "is not empty" in refused(capsys, str(source), "--output", str(full), "--format", "int8")
    assert not (tmp_path / "made").exists()
    values: dict[str, Any] = json.loads((source / "config.json").read_text())
    own = {**values, "quantization_config": {"quant_method": "gptq"}}
    packed = save(tmp_path / "packed", load_file(source / "model.safetensors"), own)
    assert "int8" in refused(capsys, str(packed), *output, "--format", "int8")
