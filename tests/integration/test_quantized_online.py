"""Dense models converted at load, through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from quantized_models import projections, quantized, same, tiny
from safetensors.torch import load_file
from smollm2 import dense_model, measured

from jackfield.errors import JackfieldError
from jackfield_quantization.online_schemes import CONVERSIONS, encode

BOUNDS = {"int8": 1.01, "mxfp8": 1.03, "fp8": 1.03, "int4": 1.4, "nf4": 1.4, "nvfp4": 1.3}
"""How much larger a real model's perplexity may become."""


def test_the_words_for_it(engine: Engine, tmp_path: Path) -> None:
    """Nothing is converted unless it is asked for, and the report says what was."""
    folder = tiny(tmp_path / "source")
    chosen = {}
    for name in ("", *BOUNDS):
        llm = engine(folder, **({"quantization": {"force": name}} if name else {}))
        chosen[name] = next(d.ref.name for d in llm.report.decisions if d.family == "quantization_methods")
    assert chosen.pop("") not in BOUNDS
    assert chosen == {name: name for name in BOUNDS}


@pytest.mark.parametrize("name", ["mxfp8", "nf4"])
def test_a_converted_model_is_that_of_the_converted_weights(engine: Engine, tmp_path: Path, name: str) -> None:
    conversion = CONVERSIONS[name]

    def write(weight: torch.Tensor) -> Any:
        return {"weight": weight}, conversion.decode(encode(weight, conversion))

    folder = tiny(tmp_path / "source")
    _, plain = quantized(folder, tmp_path, write, {})
    same(engine(folder, max_model_len=128, quantization={"force": name}), engine(plain, max_model_len=128))


@pytest.mark.parametrize("name", ["nf4", "fp8", "calibrated_gptq"])
def test_a_method_that_takes_no_layer_is_refused(engine: Engine, tmp_path: Path, name: str) -> None:
    """A user who asks for it must not get the dense model."""
    options = {"plugins.options": {name: {"only": "nowhere"}}}
    with pytest.raises(JackfieldError) as caught:
        engine(tiny(tmp_path / "source"), quantization={"force": name}, **options)
    assert caught.value.field == "quantization" and caught.value.value == name
    assert "takes none of the model's layers" in caught.value.message


def test_some_layers_alone(engine: Engine, tmp_path: Path) -> None:
    conversion = CONVERSIONS["nf4"]
    folder = tiny(tmp_path / "source")

    def write(weight: torch.Tensor) -> Any:
        return {"weight": weight}, conversion.decode(encode(weight, conversion))

    def which(module: str) -> bool:
        return projections(module) and "mlp" in module and "layers.0" not in module

    _, plain = quantized(folder, tmp_path, write, {}, which)
    assert len(load_file(plain / "model.safetensors")) == len(load_file(folder / "model.safetensors"))
    options = {"nf4": {"only": "mlp", "ignore": "model.layers.0"}}
    found = engine(folder, max_model_len=128, quantization={"force": "nf4"}, **{"plugins.options": options})
    same(found, engine(plain, max_model_len=128))
    with pytest.raises(JackfieldError, match="can only be converted together"):
        engine(folder, quantization={"force": "nf4"}, **{"plugins.options": {"nf4": {"ignore": "re:.*k_proj"}}})
    with pytest.raises(JackfieldError, match="ignored"):
        engine(folder, quantization={"force": "nf4"}, **{"plugins.options": {"nf4": {"ignored": "k_proj"}}})


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_keeps_its_perplexity(tmp_path: Path) -> None:
    folder = dense_model(tmp_path / "model")
    plain = measured(folder)
    found = {name: measured(folder, quantization={"force": name}) / plain for name in BOUNDS}
    assert 2.0 < plain < 80.0
    assert {name: ratio for name, ratio in found.items() if ratio > BOUNDS[name]} == {}
    assert found["int8"] < found["int4"], "more bits cost less"
