"""Orders in which torchao stores numbers for tensor cores: put back, cut among ranks, or refused by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from stored_world import EXPERTS, PATH, Rank, each_rule, linear, method_named, moe, named
from torchao_writer import tiles_of

from jackfield.errors import CheckpointError, ConfigError
from jackfield.interfaces import MoEConfig, OutputShard, Parallel
from jackfield.layers.linear import Linear
from jackfield_quantization.packing import E2M1, unpack_nibbles
from jackfield_quantization.torchao_storage import unswizzled, untiled

CONFIG: dict[str, Any] = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Whatever", "_data": {}}}}
GROUP, INPUTS = 32, 256


def random(*shape: int, high: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@cache
def tiled(outputs: int, inputs: int = INPUTS, padded: int = 1024) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return tensors of tiles, and the matrix that they mean."""
    rows = -(-outputs // 8) * 8
    numbers = random(rows, padded)
    pairs = torch.rand(padded // GROUP, rows, 2, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale, zero = (pairs.float()[..., n].t().repeat_interleave(GROUP, 1) for n in (0, 1))
    tensors = {"_weight_qdata": tiles_of(numbers), "_weight_scale_and_zero": pairs}
    return tensors, ((numbers - 8) * scale + zero)[:outputs, :inputs]


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as cuBLAS' documentation says that they lie, one by one."""
    rows, columns = -(-scales.shape[0] // 128), -(-scales.shape[1] // 4)
    flat = torch.zeros(rows * columns * 512, dtype=scales.dtype)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            tile = row // 128 * columns + column // 4
            flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
    return flat.view(rows * 32, columns * 16)


@cache
def microscaled(outputs: int, *, mx: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return tensors of four-bit floats with swizzled scales, and the matrix that they mean."""
    block = 32 if mx else 16
    packed = random(outputs, INPUTS // 2, high=256).to(torch.uint8)
    scales = random(outputs, INPUTS // block, high=8, seed=1)
    bytes_ = (scales + 124 if mx else scales * 8).to(torch.uint8)
    kind = torch.float8_e8m0fnu if mx else torch.float8_e4m3fn
    wide = torch.tensor(E2M1)[unpack_nibbles(packed).long()]
    factors = torch.exp2(scales.float() - 3) if mx else bytes_.view(kind).float() * 0.5
    tensors = {"_weight_qdata": packed, "_weight_scale": swizzled(bytes_).view(kind)}
    extra = {} if mx else {"_weight_per_tensor_scale": torch.tensor(0.5)}
    return {**tensors, **extra}, wide * factors.repeat_interleave(block, 1)


def loaded(tensors: dict[str, torch.Tensor], shards: tuple[OutputShard, ...], **layer: Any) -> Linear:
    return linear(method_named("torchao"), CONFIG, tensors, INPUTS, shards, **layer)


FORMS = {
    "tiles": tiled,
    "mxfp4": lambda outputs: microscaled(outputs, mx=True),
    "nvfp4": lambda outputs: microscaled(outputs, mx=False),
}
EVERY = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_tiles_are_put_back(inner: int) -> None:
    numbers = random(24, 16 * 8 * 3)
    assert torch.equal(untiled(tiles_of(numbers, inner)), numbers.int())


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (300, 9), (16, 2), (512, 32)])
def test_swizzled_scales_are_put_back(rows: int, columns: int) -> None:
    scales = random(rows, columns, high=256).to(torch.uint8)
    assert torch.equal(unswizzled(swizzled(scales), columns)[:rows], scales)


@EVERY
@pytest.mark.parametrize("outputs", [12, 32, 128, 130, 384])
def test_any_number_of_outputs(form: str, outputs: int) -> None:
    tensors, meaning = FORMS[form](outputs)
    layer = loaded(named(f"{PATH}.o", tensors), (OutputShard("o", outputs),))
    assert torch.equal(layer.scheme.dequantize(layer), meaning)


@EVERY
@pytest.mark.parametrize("outputs", [64, 256])
@pytest.mark.parametrize("parallel", [Parallel.COLUMN, Parallel.ROW])
def test_ranks_have_their_parts(form: str, outputs: int, parallel: Parallel) -> None:
    """Cuts go through whole tiles of 128 outputs, and through parts of one."""
    tensors, meaning = FORMS[form](outputs)
    whole = named(f"{PATH}.o", tensors)
    for rank in range(2):
        layer = loaded(whole, (OutputShard("o", outputs),), parallel=parallel, rank=Rank(rank, 2))
        part = meaning.chunk(2, 0 if parallel is Parallel.COLUMN else 1)[rank]
        assert torch.equal(layer.scheme.dequantize(layer), part)


@EVERY
def test_matrices_that_are_fused_on_disk(form: str) -> None:
    tensors, meaning = FORMS[form](512)
    shards = (OutputShard("q", 256), OutputShard("k", 128), OutputShard("v", 128))
    layer = loaded(named(f"{PATH}.qkv", tensors), shards, fused="qkv")
    assert torch.equal(layer.scheme.dequantize(layer), meaning)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_parts_that_begin_inside_a_tile_are_refused(form: str) -> None:
    tensors, _ = FORMS[form](256)
    shards = (OutputShard("q", 192), OutputShard("k", 64))
    with pytest.raises(CheckpointError, match="rows cannot be told apart"):
        loaded(named(f"{PATH}.qk", tensors), shards, fused="qk")


@pytest.mark.parametrize("form", FORMS)
def test_experts_one_by_one(form: str) -> None:
    """Scales that are out of order are in no published layout: such experts become dense."""
    block = MoEConfig(num_experts=2, top_k=1, hidden_size=INPUTS, intermediate_size=INPUTS)
    tensors: dict[str, torch.Tensor] = {}
    meanings = {}
    for expert in range(2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            found, meanings[expert, name] = FORMS[form](INPUTS)
            tensors |= named(f"{EXPERTS}.{expert}.{name}", found)
    made = moe(method_named("torchao"), CONFIG, tensors, block, each_rule(2))
    for expert in range(2):
        up = torch.cat([meanings[expert, "gate_proj"], meanings[expert, "up_proj"]])
        assert torch.equal(made.gate_up.scheme.dequantize(made.gate_up)[expert], up)
        assert torch.equal(made.down.scheme.dequantize(made.down)[expert], meanings[expert, "down_proj"])


def refused(tensors: dict[str, torch.Tensor], match: str, config: dict[str, Any] = CONFIG) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        linear(method_named("torchao"), config, named(f"{PATH}.o", tensors), INPUTS, (OutputShard("o", 64),))
    assert caught.value.field == "quantization_config" and "what is read:" in (caught.value.remedy or "")


def test_forms_of_other_devices_are_named() -> None:
    """Words of NPUs, whose zeros are no whole numbers; a kernel's own order; tiles that are none; six bits of which
    nothing says what they mean.
    """
    scale = torch.ones(INPUTS // GROUP, 64).bfloat16()
    words = random(64, INPUTS // 8).int()
    parts = {"_weight_qdata": words, "_weight_scale": scale, "_weight_zero_point": scale}
    refused(parts, r"numbers of type int32 and shape \[64, 32\] beside .*_weight_zero_point \(bfloat16, \[8, 64\]\)")
    shuffled = {"_weight_qdata": random(64, INPUTS // 2).to(torch.int8), "_weight_group_scale": scale}
    refused({**shuffled, "_weight_group_zero": scale}, "made of _weight_group_scale, _weight_group_zero, _weight_qdata")
    odd = {"_weight_qdata": random(4, 8, 64, 4).int(), "_weight_scale_and_zero": torch.ones(32, 32, 2).bfloat16()}
    refused(odd, r"shape \[4, 8, 64, 4\]")
    codes = random(64, INPUTS, high=64).to(torch.uint8)
    exponents = torch.full((64, INPUTS // 32), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    six = {"_weight_qdata": codes, "_weight_scale": exponents}
    refused(six, r"numbers of type uint8 and shape \[64, 256\]")
    several = {"quant_type": {"default": {"_type": "F", "_data": {"a": "fp6_e2m3", "b": "fp6_e3m2"}}}}
    refused(six, r"numbers of type uint8 and shape \[64, 256\]", several)


def of(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": data}


PACKED = "quantization_config.quant_type.default.int4_packing_format"


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (of("Int4WeightOnlyConfig", int4_packing_format="preshuffled"), PACKED, "packs as 'preshuffled'"),
        (
            of("Int4WeightOnlyConfig", int4_packing_format={"_type": "Int4PackingFormat", "_data": "PRESHUFFLED"}),
            PACKED,
            "packs as 'preshuffled'",
        ),
        (of("Float8DynamicActivationInt4WeightConfig", int4_packing_format="preshuffled"), PACKED, "preshuffled"),
        (
            of("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d", int4_tile_packed_ntile=16),
            "quantization_config.quant_type.default.int4_tile_packed_ntile",
            "tiles of 16 outputs",
        ),
        (
            of("Int8DynamicActivationIntxWeightConfig", intx_packing_format="opaque_torchao_auto"),
            "quantization_config.quant_type.default.intx_packing_format",
            "packs as 'opaque_torchao_auto'",
        ),
        (
            of("Float8DynamicActivationFloat8WeightConfig", packing_format="sparse_2d_data_2d_metadata"),
            "quantization_config.quant_type.default.packing_format",
            "packs as 'sparse_2d",
        ),
        (of("UIntxWeightOnlyConfig", bit_width=4), "quantization_config.quant_type.default", "gemlite"),
        (
            of("FqnToConfig", fqn_to_config={"re:.*q": of("Int4WeightOnlyConfig", int4_packing_format="opaque")}),
            "quantization_config.quant_type.default.fqn_to_config.re:.*q.int4_packing_format",
            "packs as 'opaque'",
        ),
    ],
)
def test_packings_that_nothing_reads_are_refused_before_anything_is_loaded(
    config: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        method_named("torchao").parse({"quant_method": "torchao", "quant_type": {"default": config}})
    assert caught.value.field == field and caught.value.value and caught.value.remedy


@pytest.mark.parametrize("packing", ["plain", "PLAIN_INT32", "tile_packed_to_4d"])
def test_packings_that_are_read(packing: str) -> None:
    stated = of("Int4WeightOnlyConfig", int4_packing_format=packing, int4_tile_packed_ntile=8)
    spec = method_named("torchao").parse({"quant_type": {"default": stated}})
    assert "int4weightonlyconfig" in spec
