"""Every scheme that the compressed-tensors library names: configurations that it wrote, and numbers that it packed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from compressed_tensors import quantization as library
from compressed_tensors.compressors import format as formats
from compressed_tensors.quantization import quant_scheme as schemes
from quantized_writers import compressed
from stored_world import PATH, linear, method_named, named

from jackfield.errors import CheckpointError
from jackfield.interfaces import OutputShard

OUTPUTS, INPUTS = 128, 256
SHARDS = (OutputShard("o", OUTPUTS),)
NAMES = sorted(name for name, scheme in schemes.PRESET_SCHEMES.items() if scheme.get("weights") is not None)


def weight_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed))


def scheme_named(name: str, **changes: Any) -> Any:
    """Return a preset of the library's, for linear layers, with other words for weights."""
    scheme = schemes.preset_name_to_scheme(name, ["Linear"])
    scheme.weights = library.QuantizationArgs(**{**scheme.weights.model_dump(), **changes})
    return scheme


def format_of(scheme: Any) -> str:
    """Return the format that the library would save a linear layer in."""
    found = formats.infer_module_format(torch.nn.Linear, scheme)
    return str(found.value if hasattr(found, "value") else found)


def config_of(scheme: Any, written: str, **others: Any) -> dict[str, Any]:
    """Return what the library writes to config.json."""
    made = library.QuantizationConfig(config_groups={"group_0": scheme}, format=written, ignore=["lm_head"], **others)
    return json.loads(json.dumps(made.to_dict(), default=str))


def dequantized(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    layer = linear(method_named("compressed_tensors"), config, named(f"{PATH}.o", tensors), INPUTS, SHARDS)
    return layer.scheme.dequantize(layer)


@pytest.mark.parametrize("name", NAMES)
def test_presets(name: str) -> None:
    scheme = scheme_named(name)
    written = format_of(scheme)
    tensors, meaning = compressed(scheme.weights.model_dump(), written)(weight_of())
    for suffix in ("input_scale", "input_zero_point", "input_global_scale", "output_scale"):
        tensors[suffix] = torch.ones(1)
    torch.testing.assert_close(dequantized(config_of(scheme, written), tensors), meaning, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("order", ["weight", "static", "group", "dynamic"])
def test_orders_of_activations(order: str) -> None:
    """Groups of inputs in another order have an index, which releases of today write no more; where inputs were sorted
    for the sake of rounding alone, groups are in order.
    """
    scheme = scheme_named("W4A16")
    config = config_of(scheme, "pack-quantized")
    config["config_groups"]["group_0"]["weights"]["actorder"] = order
    tensors, meaning = compressed(scheme.weights.model_dump(), "pack-quantized")(weight_of())
    if order in ("group", "dynamic"):
        groups = (torch.arange(INPUTS) // 128)[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))]
        scales = tensors["weight_scale"].float()
        codes = (meaning / scales.repeat_interleave(128, 1)).round()
        tensors["weight_g_idx"], meaning = groups.int(), codes * scales[:, groups]
    torch.testing.assert_close(dequantized(config, tensors), meaning)


def test_schemes_of_the_cache_and_of_versions_to_come() -> None:
    """A scheme of the cache, a status and a version beside the groups change nothing about weights."""
    scheme = scheme_named("FP8_DYNAMIC")
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config = config_of(scheme, "float-quantized", kv_cache_scheme=cache)
    assert config["kv_cache_scheme"]["num_bits"] == 8
    tensors, meaning = compressed(scheme.weights.model_dump(), "float-quantized")(weight_of())
    torch.testing.assert_close(
        dequantized({**config, "version": "99", "global_compression_ratio": 2.0}, tensors), meaning
    )


def test_numbers_of_few_bits_in_bytes() -> None:
    """Four bits for eight-bit activations, not packed (W4A8 of earlier releases)."""
    scheme = scheme_named("W4A8", strategy="channel", group_size=None)
    tensors, meaning = compressed(scheme.weights.model_dump(), "int-quantized")(weight_of())
    assert tensors["weight"].dtype == torch.int8
    torch.testing.assert_close(dequantized(config_of(scheme, "int-quantized"), tensors), meaning)


def test_a_scale_that_is_not_there_is_no_one() -> None:
    scheme = scheme_named("FP8")
    tensors, _ = compressed(scheme.weights.model_dump(), "float-quantized")(weight_of())
    del tensors["weight_scale"]
    with pytest.raises(CheckpointError, match=r"lacks weights .*weight_scale"):
        dequantized(config_of(scheme, "float-quantized"), tensors)
