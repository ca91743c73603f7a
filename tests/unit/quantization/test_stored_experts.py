"""Experts of quantized checkpoints: what is published to expert kernels is what the checkpoint says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_writers import FORMATS, four_bit_floats, fp8, pairs, value_of
from stored_world import EXPERTS, Rank, each_rule, method_named, moe, named

from jackfield.errors import CheckpointError
from jackfield.interfaces import MoEConfig, RowSlice, WeightRule
from jackfield.layers.moe import Moe
from jackfield_moe.layouts import matrix_of

COUNT, WIDTH, INNER = 3, 64, 128
BLOCK = MoEConfig(num_experts=COUNT, top_k=2, hidden_size=WIDTH, intermediate_size=INNER)
SIZES = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}


def one_by_one(write: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return tensors of a checkpoint with each expert's matrices, and what those mean."""
    tensors: dict[str, torch.Tensor] = {}
    meanings: list[dict[str, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(4)
    for expert in range(COUNT):
        meanings.append({})
        for name, size in SIZES.items():
            weight = torch.randn(size, generator=generator) * (expert + 1)
            found, meanings[-1][name] = write(weight)
            tensors |= named(f"{EXPERTS}.{expert}.{name}", found)
    return tensors, meanings


def dense(made: Moe, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an expert's matrices out of the published layout."""
    up, down = made.gate_up.matrices(), made.down.matrices()
    return matrix_of(up, expert, torch.float32), matrix_of(down, expert, torch.float32)


OTHERWISE = ("ct-sparse-fp8", "modelopt-nvfp4-fp8", "modelopt-int4-fp8-awq")
"""Sparse, or in 8-bit floats as far as activations go."""
LAYOUTS = {
    **dict.fromkeys([n for n in FORMATS if ("fp8" in n or n == "fbgemm") and n not in OTHERWISE], "fp8"),
    **dict.fromkeys(["gptq-4", "gptq-4-wide", "gptq-4-whole", "gptq-4-v2", "awq"], "int4"),
    **dict.fromkeys(["auto-round", "auto-round-gptq", "auto-round-awq", "awq-gemv"], "int4"),
    **dict.fromkeys(["quark-int4", "quark-int4-in-order", "quark-uint4"], "int4"),
    **dict.fromkeys(["ct-w4-group", "ct-w4-asymmetric", "ct-w4-channel"], "int4"),
    **dict.fromkeys(["ct-mxfp4", "quark-mxfp4", "modelopt-mxfp4", "auto-round-mxfp4"], "mxfp4"),
}
"""What experts stay in; all else becomes dense."""


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_what_is_stored(name: str, size: int) -> None:
    """Four ranks hold 32 of 128 inner columns: cuts go through groups of 64 and blocks of 40, 24 and 128."""
    kind = FORMATS[name]
    tensors, meanings = one_by_one(kind.write)
    method, step = method_named(kind.method), INNER // size
    for rank in range(size):
        made = moe(method, kind.config, tensors, BLOCK, each_rule(COUNT), Rank(rank, size))
        guess = method.experts_layout(method.parse(kind.config))
        assert made.gate_up.scheme.layout == LAYOUTS.get(name, "dense")
        # Backends that take other layouts take dense experts too.
        assert guess == made.gate_up.scheme.layout or guess != "dense"
        part = slice(rank * step, (rank + 1) * step)
        for expert, meaning in enumerate(meanings):
            up, down = dense(made, expert)
            expected = torch.cat([meaning["gate_proj"][part], meaning["up_proj"][part]])
            torch.testing.assert_close(up, expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(down, meaning["down_proj"][:, part], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gptq-4", "gptq-4-wide", "gptq-4-whole", "awq", "ct-w4-asymmetric", "auto-round"])
def test_four_bits_stay_four_bits(name: str) -> None:
    """Ranks that cut through a group of 64 have groups of 32."""
    kind = FORMATS[name]
    tensors, meanings = one_by_one(kind.write)
    made = moe(method_named(kind.method), kind.config, tensors, BLOCK, each_rule(COUNT), Rank(1, 4))
    weight, scale = made.down.matrices().weight, made.down.matrices().scale
    assert made.down.matrices().layout == "int4" and weight.dtype == torch.uint8
    assert weight.shape == (COUNT, WIDTH, INNER // 8) and scale is not None and scale.shape == (COUNT, WIDTH, 1)
    whole = made.down.scheme.dequantize(made.down)
    assert torch.equal(whole, torch.stack([meaning["down_proj"][:, 32:64] for meaning in meanings]))


def test_order_that_the_configuration_denies_is_refused() -> None:
    kind = FORMATS["gptq-4-order"]
    tensors, _ = one_by_one(kind.write)
    with pytest.raises(CheckpointError, match="of inputs in another order"):
        moe(method_named("gptq"), {**kind.config, "desc_act": False}, tensors, BLOCK, each_rule(COUNT))


def test_descriptions_of_experts_differ_in_length() -> None:
    """Those of nested scales have an offset of their own, with as many digits as it needs."""
    kind = FORMATS["bnb-nf4-nested"]
    tensors, _ = one_by_one(kind.write)
    lengths = [len(tensor) for name, tensor in tensors.items() if "quant_state" in name]
    assert len(set(lengths)) > 1
    state = next(name for name in reversed(tensors) if "quant_state" in name)
    long = {**tensors, state: torch.cat((tensors[state], torch.full((100,), ord(" "), dtype=torch.uint8)))}
    with pytest.raises(CheckpointError, match="does not fit"):
        moe(method_named(kind.method), kind.config, long, BLOCK, each_rule(COUNT))


def test_whole_blocks_keep_one_scale() -> None:
    """Scales are repeated only where a cut asks for that."""
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    tensors, _ = one_by_one(fp8((32, 32), suffix="weight_scale_inv"))
    made = moe(method_named("fp8_checkpoint"), config, tensors, BLOCK, each_rule(COUNT))
    scale = made.gate_up.matrices().scale
    assert scale is not None and scale.shape == (COUNT, 2 * INNER // 32, WIDTH // 32)
    assert made.gate_up.matrices().weight.dtype == torch.float8_e4m3fn


def test_experts_in_one_tensor() -> None:
    """All experts in front, gate and up fused along outputs."""
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    ups, downs, meanings = [], [], []
    for expert in range(COUNT):
        generator = torch.Generator().manual_seed(expert)
        write = fp8((32, 32), suffix="weight_scale_inv")
        up, up_meaning = write(torch.randn(2 * INNER, WIDTH, generator=generator))
        down, down_meaning = write(torch.randn(WIDTH, INNER, generator=generator))
        ups.append(up)
        downs.append(down)
        meanings.append((up_meaning, down_meaning))
    tensors = {f"{EXPERTS}.gate_up_proj.{name}": stacked([up[name] for up in ups]) for name in ups[0]}
    tensors |= {f"{EXPERTS}.down_proj.{name}": stacked([down[name] for down in downs]) for name in downs[0]}
    rules = [
        WeightRule(f"{EXPERTS}.gate_up_proj", "experts.gate_up", "gate", cut=RowSlice(0, INNER, 2 * INNER)),
        WeightRule(f"{EXPERTS}.gate_up_proj", "experts.gate_up", "up", cut=RowSlice(INNER, 2 * INNER, 2 * INNER)),
        WeightRule(f"{EXPERTS}.down_proj", "experts.down"),
    ]
    made = moe(method_named("fp8_checkpoint"), config, tensors, BLOCK, rules)
    for expert, (up_meaning, down_meaning) in enumerate(meanings):
        assert torch.equal(dense(made, expert)[0], up_meaning)
        assert torch.equal(dense(made, expert)[1], down_meaning)


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Stack tensors of any type."""
    if tensors[0].dtype == torch.float8_e4m3fn:
        return torch.stack([tensor.view(torch.uint8) for tensor in tensors]).view(torch.float8_e4m3fn)
    return torch.stack(tensors)


def microscaled(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (blocks [..., I / 32, 16], exponents [..., I / 32], what they mean)."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    wide = 2.0 ** exponent.unsqueeze(-1)
    codes = four_bit_floats(groups / wide)
    return pairs(codes), (exponent + 127).to(torch.uint8), (value_of(codes) * wide).flatten(-2)


def gpt_oss() -> tuple[dict[str, torch.Tensor], list[WeightRule], torch.Tensor, torch.Tensor]:
    """Return tensors and rules of packed experts, gate and up taking turns, and what the matrices mean."""
    generator = torch.Generator().manual_seed(8)
    up = microscaled(torch.randn(COUNT, 2 * INNER, WIDTH, generator=generator))
    down = microscaled(torch.randn(COUNT, WIDTH, INNER, generator=generator))
    tensors = {}
    rules = []
    for name, made in (("gate_up_proj", up), ("down_proj", down)):
        for suffix, tensor in (("blocks", made[0]), ("scales", made[1])):
            source = f"{EXPERTS}.{name}_{suffix}"
            tensors[source] = tensor
            if name == "down_proj":
                rules.append(WeightRule(source, "experts.down", suffix=suffix))
                continue
            for place, shard in enumerate(("gate", "up")):
                cut = RowSlice(place, place + 1, 2, INNER)
                rules.append(WeightRule(source, "experts.gate_up", shard, cut=cut, suffix=suffix))
    return tensors, rules, up[2], down[2]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_microscaled_experts_stay_packed(size: int) -> None:
    tensors, rules, up, down = gpt_oss()
    method, step = method_named("mxfp4"), INNER // size
    for rank in range(size):
        made = moe(method, {"quant_method": "mxfp4"}, tensors, BLOCK, rules, Rank(rank, size))
        part = slice(rank * step, (rank + 1) * step)
        assert made.down.matrices().weight.dtype == torch.uint8
        for expert in range(COUNT):
            found_up, found_down = dense(made, expert)
            assert torch.equal(found_up, torch.cat([up[expert, 0::2][part], up[expert, 1::2][part]]))
            assert torch.equal(found_down, down[expert][:, part])
        whole = made.down.scheme.dequantize(made.down)
        assert torch.equal(whole, down[:, :, part])


def test_a_cut_through_an_exponent_is_refused() -> None:
    tensors, rules, _, _ = gpt_oss()
    with pytest.raises(CheckpointError, match="inputs 0 to 16 are not whole groups of 32"):
        moe(method_named("mxfp4"), {"quant_method": "mxfp4"}, tensors, BLOCK, rules, Rank(0, 8))
