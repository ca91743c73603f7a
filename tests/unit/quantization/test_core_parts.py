"""What the core does for quantized checkpoints: names, repeated rows, options, layers that become dense."""

from __future__ import annotations

import pytest
import torch
from quantized_writers import FORMATS
from stored_world import PATH, linear, method_named, named

from jackfield.interfaces import OutputShard, Settings, WeightRule
from jackfield.interfaces.facts import split_name
from jackfield.layers.linear import ThenPlain
from jackfield.loader.arrange import arrange, repeated_rows
from jackfield_quantization.stored import DecodedScheme
from jackfield_quantization.unquantized import Unquantized


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("a.up.weight", ("a.up", "weight")),
        ("a.up.weight.absmax", ("a.up", "weight.absmax")),
        ("a.up.weight.quant_state.bitsandbytes__nf4", ("a.up", "weight.quant_state.bitsandbytes__nf4")),
        ("a.experts.gate_up_proj_blocks", ("a.experts", "gate_up_proj_blocks")),
        ("sinks", ("", "sinks")),
    ],
)
def test_what_belongs_to_a_tensor_belongs_to_its_module(name: str, right: tuple[str, str]) -> None:
    assert split_name(name, {"a.up.weight", "a.up.scales", "a.experts.gate_up_proj", name}) == right


@pytest.mark.parametrize(("rows", "length"), [(0, 9), (9, 9), (8, 8), (7, 7), (6, 9), (10, 9)])
def test_the_last_block_may_be_cut_short(rows: int, length: int) -> None:
    scale = torch.tensor([[1.0], [2.0], [3.0]])
    found = repeated_rows(scale, 3, 0, rows)
    assert found.flatten().tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0][:length]


def test_methods_without_options_keep_their_spec() -> None:
    spec = Unquantized.parse({})
    assert Unquantized.configure(spec, Settings()) is spec and Unquantized.exporter(spec) is None


def test_layers_that_become_dense_are_run_by_the_method_for_plain_layers() -> None:
    """The scheme for plain layers prepares the weight once, and no stored tensor is left."""
    kind = FORMATS["awq"]
    found, meaning = kind.write(torch.randn(32, 64))
    tensors = named(f"{PATH}.o", found)
    layer = linear(method_named("awq"), kind.config, tensors, 64, (OutputShard("o", 32),))
    assert isinstance(layer.scheme, ThenPlain) and DecodedScheme.becomes_dense
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert torch.equal(layer.scheme.lookup(layer, torch.tensor([3, 0])), meaning[[3, 0]])
    assert layer.scheme.activation_spec(layer.info, 8) is None


def test_packed_matrices_are_not_transposed_with_plain_ones() -> None:
    """GPT-2 has its plain matrices inputs first; GPTQ packs all models alike."""
    kind = FORMATS["gptq-4"]
    found, _ = kind.write(torch.randn(64, 64))
    layer = linear(method_named("gptq"), kind.config, named(f"{PATH}.o", found), 64, (OutputShard("o", 64),))
    rule = WeightRule(f"{PATH}.o", "layer", "o", transposed=True)
    assert torch.equal(arrange(found["qweight"], rule, layer, "qweight"), found["qweight"])
    plain = torch.randn(64, 64)
    assert torch.equal(arrange(plain, rule, layer, "weight"), plain.t())
