"""A real model in checkpoints of every family of formats: how much its perplexity grows."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantized_models import quantized
from quantized_writers import FORMATS
from smollm2 import dense_model, measured

from jackfield.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.model]

BOUNDS = {
    **dict.fromkeys(("fp8-channel", "fp8-block", "modelopt-mxfp8", "ct-mxfp6"), 1.05),
    **dict.fromkeys(("ct-int8-channel", "ct-w8-group", "bnb-int8", "quark-int8", "gptq-8"), 1.02),
    **dict.fromkeys(("gptq-4", "awq", "ct-w4-asymmetric", "hqq-4", "ao-int4-pairs"), 1.4),
    **dict.fromkeys(("bnb-nf4", "ct-nvfp4", "quark-mxfp4"), 1.6),
}
"""How much larger perplexity may become where numbers are rounded to the nearest; see docs/plugins/quantization.md."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_model(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def plain(source: Path) -> float:
    return measured(source)


@pytest.mark.parametrize("name", BOUNDS)
def test_perplexity_stays_within_the_bound(source: Path, plain: float, tmp_path: Path, name: str) -> None:
    kind = FORMATS[name]
    packed, _ = quantized(source, tmp_path, kind.write, kind.config)
    ratio = measured(packed, tokenizer=str(source)) / plain
    assert 0.95 < ratio < BOUNDS[name]
    assert ratio != 1.0, "nothing was rounded"


@pytest.mark.parametrize(("type_", "bound"), [("f32", 1.0001), ("q8_0", 1.02), ("q4_0", 1.4)])
def test_gguf_files_that_are_written(source: Path, plain: float, tmp_path: Path, type_: str, bound: float) -> None:
    option = ("--plugins.options.gguf_file.type", type_)
    assert main(["quantize", str(source), "--output", str(tmp_path), "--format", "gguf", *option]) == 0
    (file,) = tmp_path.iterdir()
    assert 0.98 < measured(file) / plain < bound
