"""A whole model in each checkpoint format: what it says is what the plain model says that it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engine
from quantized_models import of_format, same, tiny
from quantized_writers import FORMATS


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama") / "source")


QUICK = (
    *("fp8-tensor", "fp8-block", "modelopt-nvfp4", "gptq-3", "gptq-4-order", "awq", "ct-w4-asymmetric"),
    *("ct-fp8-channel", "ct-nvfp4", "bnb-nf4-nested", "bnb-int8", "auto-round", "quark-mxfp4", "hqq-4"),
)
"""One or two of each method; all are compared layer by layer in tests/unit/quantization."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_a_quantized_model_is_the_plain_one_it_stands_for(
    engine: Engine, source: Path, tmp_path: Path, name: str
) -> None:
    packed, plain = of_format(source, tmp_path, FORMATS[name])
    expected = engine(plain, max_model_len=128)
    llm, own = engine(packed, max_model_len=128), FORMATS[name].method
    chosen = next(d.ref.name for d in llm.report.decisions if d.family == "quantization_methods")
    assert chosen in (own, f"native_{own}")
    same(llm, expected)
    if chosen != own:
        same(engine(packed, max_model_len=128, quantization={"force": own}), expected)
