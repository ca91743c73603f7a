"""Dense weights converted at load: how far numbers move, what experts get, which layers are meant."""

from __future__ import annotations

from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from quantized_writers import value_of, whole_numbers
from stored_world import EXPERTS, PATH, Rank, each_rule, method_named, moe, named

from jackfield.errors import ConfigError
from jackfield.interfaces import (
    Band,
    DeviceFacts,
    LayerInfo,
    MoEConfig,
    OutputShard,
    Parallel,
    QuantizationRequest,
    Settings,
)
from jackfield.layers.linear import Linear
from jackfield_moe.layouts import matrix_of
from jackfield_quantization.online import OnlineSpec
from jackfield_quantization.online_schemes import CONVERSIONS, NATIVE, encode
from jackfield_quantization.packing import NF4

INPUTS = 128
EVERY = pytest.mark.parametrize("name", ["fp8", "int8", "int4", "mxfp8", "nf4", "nvfp4"])
BLOCKS = pytest.mark.parametrize("name", list(CONVERSIONS))
SHARDS = (OutputShard("q_proj", 64), OutputShard("k_proj", 32))


def weight_of(outputs: int = 96, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, INPUTS, generator=generator) * torch.logspace(-2, 1, outputs).unsqueeze(1)


def made(name: str, weight: torch.Tensor, dtype: str = "float32", spec: OnlineSpec | None = None) -> Linear:
    sources = {shard.name: f"{PATH}.{shard.name}" for shard in SHARDS}
    info = LayerInfo("layer", INPUTS, SHARDS, Parallel.REPLICATED, dtype=dtype, sources=sources)
    scheme = method_named(name).scheme(info, spec)
    assert scheme is not None
    layer = Linear(info, scheme, Rank(), torch.device("cpu"))
    start = 0
    for shard in SHARDS:
        layer.load(shard.name, "weight", weight[start : start + shard.size].to(getattr(torch, dtype)))
        start += shard.size
    layer.finalize()
    return layer


def largest_of_blocks(weight: torch.Tensor, size: int) -> torch.Tensor:
    return weight.unflatten(1, (-1, size)).abs().amax(-1).repeat_interleave(size, 1)


def test_no_number_moves_further_than_half_a_step() -> None:
    weight = weight_of()
    largest = largest_of_blocks(weight, 32)
    eight = made("int8", weight)
    assert bool(((eight.scheme.dequantize(eight) - weight).abs() <= largest * (0.5 / 127 + 2.0**-10)).all())
    blocks = weight.unflatten(1, (-1, 32))
    span = (blocks.amax(-1).clamp(min=0) - blocks.amin(-1).clamp(max=0)).repeat_interleave(32, 1)
    four = made("int4", weight)
    moved = four.scheme.dequantize(four) - weight
    # Of spans down to seven tenths the one that moves a block's numbers least is taken.
    assert bool((moved.abs() <= span * (0.15 + 1.0 / 15)).all())
    numbers, scale, zero = whole_numbers(weight, 4, torch.arange(INPUTS) // 32, symmetric=False)
    plain = (numbers - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1) - weight
    least, most = (x.unflatten(1, (-1, 32)).square().sum(-1) for x in (moved, plain))
    assert bool((least <= most * 1.01 + 1e-9).all()) and float(least.sum()) < 0.97 * float(most.sum())
    floats = made("mxfp8", weight)
    found = floats.scheme.dequantize(floats)
    assert bool(((found - weight).abs() <= weight.abs() / 16 * 1.001 + largest * 2.0**-16).all())
    sixteen = made("nf4", weight)
    gaps = max(b - a for a, b in pairwise(NF4)) / 2
    wide = largest_of_blocks(weight, 64)
    assert bool(((sixteen.scheme.dequantize(sixteen) - weight).abs() <= wide * gaps * 1.001).all())


@pytest.mark.parametrize("name", ["int8", "mxfp8", "nf4", "nvfp4"])
def test_every_number_is_the_nearest_that_there_is(name: str) -> None:
    """Converting what was converted changes nothing."""
    conversion = CONVERSIONS[name]
    first = conversion.decode(encode(weight_of(), conversion))
    again = conversion.decode(encode(first, conversion))
    torch.testing.assert_close(again, first, rtol=1e-3, atol=0.0)


def test_nvfp4_is_what_the_library_makes_of_it() -> None:
    """Scales and numbers, also between two codes, where the even one is taken."""
    weight = weight_of()
    weight[0, :16] = torch.tensor(
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0]
    )
    weight[1] = 0
    form = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    arguments = QuantizationArgs(**form, scale_dtype="torch.float8_e4m3fn", zp_dtype="torch.float8_e4m3fn")
    blocks = weight.unflatten(1, (-1, 16))
    common = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale=common)
    stored = encode(weight, CONVERSIONS["nvfp4"])
    assert torch.equal(stored["weight_global_scale"], common)
    assert torch.equal(stored["weight_scale"].float()[blocks.abs().amax(-1) > 0], scale[blocks.abs().amax(-1) > 0])
    expected = fake_quantize(weight, scale, zero, arguments, global_scale=common)
    assert torch.equal(CONVERSIONS["nvfp4"].decode(stored), expected)


def test_blocks_are_ggufs_own() -> None:
    """The bytes that kernels read, decoded by the gguf package."""
    weight = weight_of()
    for name, (word, pack) in NATIVE.items():
        conversion = CONVERSIONS[name]
        stored = encode(weight, conversion)
        own = torch.from_numpy(np.array(gguf.quants.dequantize(pack(stored).numpy(), gguf.GGMLQuantizationType[word])))
        # The least number of a block is rounded to float16.
        least = stored.get("weight_zero", torch.zeros(())).float() * stored["weight_scale"].float()
        bound = (least * 2.0**-11).repeat_interleave(32, 1) + 1e-6
        assert bool(((own - conversion.decode(stored)).abs() <= bound * 1.01).all())


@BLOCKS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_a_product_is_that_of_the_converted_weight(name: str, dtype: str, rows: int) -> None:
    layer = made(name, weight_of(), dtype)
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    weight = layer.scheme.dequantize(layer)
    expected = x.double() @ weight.double().t()
    close = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    found = layer(x)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close * float(expected.abs().max()))
    out = torch.empty_like(found)
    assert layer.scheme.apply(layer, x, None, out) is out
    torch.testing.assert_close(out, found)


@BLOCKS
def test_weights_take_less_memory(name: str) -> None:
    layer = made(name, weight_of())
    stored = sum(p.numel() * p.element_size() for p in layer.parameters())
    bits = {"int8": 8.5, "int4": 5.0, "mxfp8": 8.25, "nf4": 4.5, "nvfp4": 4.5}[name]
    assert stored * 8 == bits * 96 * INPUTS + (32 * 96 if name == "nvfp4" else 0)


@BLOCKS
def test_zeros_stay_zeros(name: str) -> None:
    layer = made(name, torch.zeros(96, INPUTS))
    assert not layer.scheme.dequantize(layer).any()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_experts_become_a_published_layout(name: str) -> None:
    block = MoEConfig(num_experts=3, top_k=2, hidden_size=INPUTS, intermediate_size=64)
    sizes = {"gate_proj": (64, INPUTS), "up_proj": (64, INPUTS), "down_proj": (INPUTS, 64)}
    tensors, generator = {}, torch.Generator().manual_seed(2)
    for expert in range(3):
        for part, size in sizes.items():
            tensors |= named(f"{EXPERTS}.{expert}.{part}", {"weight": torch.randn(size, generator=generator)})
    found = moe(method_named(name), {}, tensors, block, each_rule(3))
    conversion = CONVERSIONS[name]
    for matrices, part, weight in ((found.gate_up, "up_proj", 1), (found.down, "down_proj", 0)):
        assert matrices.matrices().layout == name
        whole = matrices.scheme.dequantize(matrices)
        for expert in range(3):
            dense = matrix_of(matrices.matrices(), expert, torch.float32)
            assert torch.equal(dense, whole[expert])
            own = dense[64:] if weight else dense
            right = conversion.decode(encode(tensors[f"{EXPERTS}.{expert}.{part}.weight"], conversion))
            assert torch.equal(own, right)


def test_floats_of_blocks_are_the_formats_own() -> None:
    """E2M1's values come from sign, exponent and mantissa; a table is no proof of itself."""
    assert value_of(torch.arange(16)).tolist()[:8] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@EVERY
def test_layers_that_are_meant(name: str) -> None:
    method = method_named(name)
    names = {"q_proj": f"{PATH}.q_proj", "k_proj": f"{PATH}.k_proj"}
    info = LayerInfo("layer", INPUTS, SHARDS, Parallel.REPLICATED, dtype="float32", sources=names)

    def taken(**options: str) -> bool:
        spec = method.configure(method.parse({}), Settings(options))
        return method.scheme(info, spec) is not None

    assert taken() and taken(only="self_attn") and taken(ignore="mlp, re:.*down_proj")
    assert not taken(ignore="layers.0") and not taken(only="layers.1") and not taken(only="self_attn", ignore="*_proj")
    with pytest.raises(ConfigError, match="are stacked and can only be converted together") as caught:
        taken(ignore="k_proj")
    assert f"{PATH}.q_proj, {PATH}.k_proj" in caught.value.remedy
    with pytest.raises(ConfigError, match="cannot be read"):
        taken(ignore="re:([")


@EVERY
@pytest.mark.parametrize(
    "info",
    [
        LayerInfo("e", INPUTS, (OutputShard("", 64),), Parallel.COLUMN, role="embedding"),
        LayerInfo("h", INPUTS, (OutputShard("", 64),), Parallel.COLUMN, role="head"),
        LayerInfo("o", 24, (OutputShard("", 64),), Parallel.COLUMN),
    ],
    ids=["embedding", "head", "odd"],
)
def test_layers_that_stay_as_they_are(name: str, info: LayerInfo) -> None:
    assert method_named(name).scheme(info, None) is None


def test_kernels_are_preferred_to_expansion() -> None:
    request = QuantizationRequest(device=DeviceFacts("cpu"), dtype="float32")
    assert method_named("nf4").preference(request).band is Band.FALLBACK
    assert method_named("int4").preference(QuantizationRequest(dtype="float16")).band is Band.FALLBACK
    assert all(method_named(name).opt_in for name in ("fp8", "int8", "int4", "mxfp8", "nf4", "nvfp4"))
