"""Which modules are quantized, by names, expressions and tensors; and what is said where a configuration is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_writers import FORMATS, awq, compressed, fp8, gptq, groups_of, nvfp4
from stored_world import PATH, Rank, linear, method_named, named, with_config

from jackfield.errors import CheckpointError, ConfigError, JackfieldError
from jackfield.interfaces import LayerInfo, OutputShard, Parallel, QuantizationRequest, TensorFacts
from jackfield_quantization.matching import named as means

INPUTS = 128
FUSED = (OutputShard("q_proj", 64), OutputShard("k_proj", 32), OutputShard("v_proj", 32))
GPTQ = FORMATS["gptq-4"].config
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}


def weight_of(outputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, INPUTS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("pattern", "module", "right"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "my_lm_head", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("layers.1.mlp", "model.layers.1.mlp.up_proj", True),
        ("model.layers.0*", "model.layers.0.self_attn.q_proj", True),
        ("*.router", "model.layers.3.mlp.router", True),
        ("*.router", "model.layers.3.mlp.router_norm", False),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj", True),
        ("re:.*k_proj", "model.layers.3.self_attn.k_proj", True),
        ("re:.*k_proj", "model.layers.3.self_attn.q_proj", False),
        ("re:model.*self_attn", "model.layers.3.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.3.self_attn.q_proj", False),
    ],
)
def test_patterns(pattern: str, module: str, right: bool) -> None:
    assert means(module, (pattern,)) is right


def facts(**dtypes: str) -> dict[str, TensorFacts]:
    return {name: TensorFacts(name, dtype, (64, INPUTS)) for name, dtype in dtypes.items()}


def info_of(role: str = "linear", source: str = f"{PATH}.o_proj", **tensors: str) -> LayerInfo:
    known = {"": facts(**tensors)} if tensors else {}
    return LayerInfo(
        "layer", INPUTS, (OutputShard("", 64),), Parallel.REPLICATED, role=role, sources={"": source}, tensors=known
    )


@pytest.mark.parametrize("name", ["fp8_checkpoint", "gptq", "awq", "compressed_tensors", "modelopt"])
def test_what_is_not_known_is_taken_to_be_quantized_where_it_multiplies(name: str) -> None:
    method = method_named(name)
    config = next(kind.config for kind in FORMATS.values() if kind.method == name)
    spec = method.parse(config)
    assert method.scheme(info_of(), spec) is not None
    assert method.scheme(info_of("embedding", "model.embed_tokens"), spec) is None
    assert method.scheme(info_of("head", "lm_head"), spec) is None


@pytest.mark.parametrize("name", ["fp8_checkpoint", "gptq", "awq", "compressed_tensors", "modelopt", "bitsandbytes"])
def test_plain_tensors_stay_plain(name: str) -> None:
    method = method_named(name)
    config = next(kind.config for kind in FORMATS.values() if kind.method == name)
    assert method.scheme(info_of(weight="bfloat16"), method.parse(config)) is None


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("fp8_checkpoint", {"ignored_layers": ["o_proj"]}),
        ("fp8_checkpoint", {"modules_to_not_convert": [f"{PATH}.o_proj"]}),
        ("awq", {"modules_to_not_convert": ["self_attn"]}),
        ("modelopt", {"quant_algo": "FP8", "exclude_modules": ["model.layers.0*"]}),
        ("modelopt", {"quantization": {"quant_algo": "FP8", "exclude_modules": ["*.o_proj"]}}),
        ("compressed_tensors", with_config(groups_of(W4, "pack-quantized"), ignore=["re:.*o_proj$"])),
        ("compressed_tensors", with_config(groups_of(W4, "pack-quantized"), ignore=["Linear"])),
        ("gptq", with_config(GPTQ, dynamic={"-:.*o_proj": {}})),
    ],
)
def test_what_is_left_alone(name: str, config: dict[str, Any]) -> None:
    """And a narrow weight that is to be left alone means nothing: it is never taken for plain numbers."""
    method = method_named(name)
    spec = method.parse(config)
    assert method.scheme(info_of(), spec) is None
    with pytest.raises(CheckpointError, match="stored as int8, but the configuration leaves it alone"):
        method.scheme(info_of(weight="int8"), spec)


def test_rules_by_module_change_bits_and_groups() -> None:
    """The first rule that matches counts."""
    config = with_config(
        GPTQ, dynamic={"-:.*q_proj": {}, "+:.*k_proj": {"bits": 8, "group_size": 64}, r".*v_proj": {"group_size": -1}}
    )
    plain = weight_of(64)
    k, k_meaning = gptq(8, 64)(weight_of(32, 1))
    v, v_meaning = gptq(4, -1)(weight_of(32, 2))
    tensors = {f"{PATH}.q_proj.weight": plain, **named(f"{PATH}.k_proj", k), **named(f"{PATH}.v_proj", v)}
    layer = linear(method_named("gptq"), config, tensors, INPUTS, FUSED)
    torch.testing.assert_close(layer.scheme.dequantize(layer), torch.cat([plain, k_meaning, v_meaning]))


def test_some_matrices_of_a_fused_layer_left_alone() -> None:
    """``re:.*k_proj`` names one matrix of a fused layer: it is plain, the others are not."""
    config = groups_of(W4, "pack-quantized", ignore=["re:.*k_proj"])
    write = compressed(W4, "pack-quantized")
    q, q_meaning = write(weight_of(64))
    v, v_meaning = write(weight_of(32, 2))
    k = weight_of(32, 1)
    tensors = {**named(f"{PATH}.q_proj", q), f"{PATH}.k_proj.weight": k, **named(f"{PATH}.v_proj", v)}
    layer = linear(method_named("compressed_tensors"), config, tensors, INPUTS, FUSED)
    torch.testing.assert_close(layer.scheme.dequantize(layer), torch.cat([q_meaning, k, v_meaning]))
    everything = groups_of(W4, "pack-quantized", ignore=["re:.*[qkv]_proj"])
    plain = {f"{PATH}.{shard.name}.weight": weight_of(shard.size) for shard in FUSED}
    alone = linear(method_named("compressed_tensors"), everything, plain, INPUTS, FUSED)
    assert torch.equal(alone.scheme.dequantize(alone), torch.cat(list(plain.values())))


@pytest.mark.parametrize("name", ["re:.*qkv_proj", "qkv_proj", f"{PATH}.qkv_proj"])
def test_a_fused_name_among_what_is_ignored(name: str) -> None:
    """The layer's own name, of matrices that are single in the checkpoint: what those are stored as decides."""
    config = groups_of(W4, "pack-quantized", ignore=[name])
    plain = {f"{PATH}.{shard.name}.weight": weight_of(shard.size) for shard in FUSED}
    layer = linear(method_named("compressed_tensors"), config, plain, INPUTS, FUSED)
    assert torch.equal(layer.scheme.dequantize(layer), torch.cat(list(plain.values())))


@pytest.mark.parametrize("key", ["version", "checkpoint_format", "format"])
def test_versions_of_awq_by_whatever_key(key: str) -> None:
    """A square matrix has the same shape in both orders."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, key: "gemv"}
    found, meaning = FORMATS["awq-gemv"].write(weight_of(INPUTS))
    shards = (OutputShard("o", INPUTS),)
    layer = linear(method_named("awq"), config, named(f"{PATH}.o", found), INPUTS, shards)
    torch.testing.assert_close(layer.scheme.dequantize(layer), meaning)


def test_groups_are_found_by_name_then_expression_then_class() -> None:
    eight = {"num_bits": 8, "type": "int", "strategy": "channel"}
    three = {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32}
    config = {
        "format": "pack-quantized",
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": W4},
            "b": {"targets": ["re:.*k_proj"], "weights": eight, "format": "int-quantized"},
            "c": {"targets": [f"{PATH}.v_proj", "re:.*nothing"], "weights": three},
        },
    }
    writers = (
        compressed(W4, "pack-quantized"),
        compressed(eight, "int-quantized"),
        compressed(three, "pack-quantized"),
    )
    tensors: dict[str, torch.Tensor] = {}
    meanings = []
    for seed, (shard, write) in enumerate(zip(FUSED, writers, strict=True)):
        found, meaning = write(weight_of(shard.size, seed))
        tensors |= named(f"{PATH}.{shard.name}", found)
        meanings.append(meaning)
    layer = linear(method_named("compressed_tensors"), config, tensors, INPUTS, FUSED)
    torch.testing.assert_close(layer.scheme.dequantize(layer), torch.cat(meanings))


FUSED_ON_DISK = {
    "fp8-tensor": FORMATS["fp8-tensor"],
    "fp8-channel": FORMATS["fp8-channel"],
    "fp8-odd-block": FORMATS["fp8-odd-block"],
    "gptq-4-order": FORMATS["gptq-4-order"],
    "awq": FORMATS["awq"],
    "ct-w4-asymmetric": FORMATS["ct-w4-asymmetric"],
    "modelopt-nvfp4": FORMATS["modelopt-nvfp4"],
}


@pytest.mark.parametrize("name", FUSED_ON_DISK)
@pytest.mark.parametrize("size", [1, 2])
def test_matrices_that_are_fused_on_disk(name: str, size: int) -> None:
    """One scale for a fused tensor is every part's; blocks may begin in one part and end in the next."""
    kind = FUSED_ON_DISK[name]
    found, meaning = kind.write(weight_of(128))
    tensors = named(f"{PATH}.qkv_proj", found)
    parts = meaning.split([shard.size for shard in FUSED])
    for rank in range(size):
        layer = linear(
            method_named(kind.method),
            kind.config,
            tensors,
            INPUTS,
            FUSED,
            parallel=Parallel.COLUMN,
            rank=Rank(rank, size),
            fused="qkv_proj",
        )
        expected = torch.cat([part.chunk(size)[rank] for part in parts])
        torch.testing.assert_close(layer.scheme.dequantize(layer), expected)


def test_rotations_of_weights_are_in_them() -> None:
    """Those of SpinQuant that need nothing at run time change how weights were made, not how they are read."""
    method, config = method_named("compressed_tensors"), groups_of(W4, "pack-quantized")
    told = with_config(config, transform_config=rotated("weight_input", "weight_output"))
    assert method.parse(told) == method.parse(config)


def test_modules_of_autoround_by_expression() -> None:
    """It writes expressions as they are; eight bits where one matches, plain where another does."""
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {
            r".*k\_proj.*": {"bits": 8, "group_size": 64},
            "model.layers.0.self_attn.v_proj": {"bits": 16},
        },
    }
    q, q_meaning = gptq(4, 32)(weight_of(64))
    k, k_meaning = gptq(8, 64)(weight_of(32, 1))
    v = weight_of(32, 2)
    tensors = {**named(f"{PATH}.q_proj", q), **named(f"{PATH}.k_proj", k), f"{PATH}.v_proj.weight": v}
    layer = linear(method_named("auto_round"), config, tensors, INPUTS, FUSED)
    torch.testing.assert_close(layer.scheme.dequantize(layer), torch.cat([q_meaning, k_meaning, v]))


def test_a_zero_point_of_zero_stays_zero() -> None:
    """Stored less one it is the largest number; one more wraps back to 0."""
    weight = weight_of(64).abs()
    found, meaning = gptq(4, 32, symmetric=False)(weight)
    assert bool((found["qzeros"] == -1).all()), "all nibbles are 15"
    layer = linear(method_named("gptq"), GPTQ, named(f"{PATH}.o", found), INPUTS, (OutputShard("o", 64),))
    torch.testing.assert_close(layer.scheme.dequantize(layer), meaning)
    assert float(layer.scheme.dequantize(layer).min()) >= 0.0


def test_an_output_projection_can_be_quantized() -> None:
    method = method_named("gptq")
    spec = method.parse(with_config(GPTQ, lm_head=True))
    assert method.scheme(info_of("head", "lm_head", qweight="int32", scales="float16"), spec) is not None
    assert method.scheme(info_of("head", "lm_head", weight="float16"), spec) is None


def rotated(*locations: str) -> dict[str, Any]:
    """Return a transform_config of compressed-tensors."""
    places = [{"targets": ["Linear"], "location": location, "inverse": False} for location in locations]
    return {"config_groups": {"u": {"type": "hadamard", "apply": places}}}


def refuse(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        method_named(name).parse(config)
    assert (caught.value.field or "").startswith("quantization_config") and caught.value.remedy


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("fp8_checkpoint", {"activation_scheme": "sometimes"}, "activation_scheme is not one of"),
        ("fp8_checkpoint", {"weight_block_size": [128]}, "weight_block_size is not a pair"),
        ("fp8_checkpoint", {"ignored_layers": "lm_head"}, "ignored_layers is not a list"),
        ("gptq", {"bits": 5}, "bits is not one of 2, 3, 4, 8"),
        ("gptq", {"bits": "4"}, "bits is not one of"),
        ("gptq", {"group_size": -7}, "group_size is not -1 or"),
        ("gptq", {"checkpoint_format": "exl2"}, "checkpoint_format is not one of"),
        ("gptq", {"checkpoint_format": "marlin", "bits": 8}, "bits is not one of 4"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype is not int32"),
        ("hqq", {"quant_config": {"scale_quant_params": {"nbits": 8}}}, "scale_quant_params is not absent"),
        ("awq", {"checkpoint_format": "other"}, "checkpoint_format is not one of"),
        ("gptq", {"dynamic": {"+:([": {}}}, "cannot be read"),
        ("gptq", {"dynamic": {"+:a": {"bits": 7}}}, "bits is not one of"),
        ("gptq", {"dynamic": [1]}, "dynamic is not a mapping"),
        ("gptq", {"dynamic": {"+:a": 4}}, "dynamic is not a mapping"),
        ("awq", {"version": "exl2"}, "version is not one of exllama, gemm, gemv, gemv_fast, ipex, marlin"),
        ("awq", {"w_bit": 3}, "w_bit is not one of 4"),
        ("compressed_tensors", {"format": "marlin-24"}, "format is not one of"),
        ("compressed_tensors", {"config_groups": [1]}, "config_groups is not a mapping"),
        ("compressed_tensors", {"transform_config": {"config_groups": {"u": {"apply": "all"}}}}, "apply is not a list"),
        ("compressed_tensors", {"config_groups": {"a": 1}}, "config_groups.a is not a mapping"),
        ("compressed_tensors", {"config_groups": {"a": {"weights": 1}}}, "weights is not a mapping"),
        ("compressed_tensors", {"config_groups": {"a": {"weights": {"strategy": "row"}}}}, "strategy is not one of"),
        ("compressed_tensors", {"config_groups": {"a": {"weights": {"num_bits": 9}}}}, "num_bits is not"),
        ("compressed_tensors", {"config_groups": {"a": {"weights": {"strategy": "group"}}}}, "group_size is not"),
        ("compressed_tensors", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse weights"),
        ("compressed_tensors", {"transform_config": rotated("weight_input", "q_attn")}, "rotations"),
        ("compressed_tensors", {"transform_config": {"config_groups": [1]}}, "config_groups is not a mapping"),
        ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is not"),
        ("modelopt", {"quant_algo": "NVFP4_SVD"}, "quant_algo is not one of"),
        ("quark", {"export": {"pack_method": "other"}}, "pack_method is not one of"),
        (
            "quark",
            {"global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}},
            "is not quantized in",
        ),
        ("auto_round", {"packing_format": "auto_round:mlx"}, "packing_format is not one of"),
        ("auto_round", {"packing_format": "auto_round:fp8", "data_type": "int"}, "data_type is not"),
        ("auto_round", {"packing_format": "auto_round:mx_fp", "data_type": "mx_fp", "bits": 6}, "bits is not one of"),
        ("auto_round", {"extra_config": {"*.q_proj": {"bits": 8}}}, "cannot be read"),
        ("modelopt", {}, "quant_algo is not one of"),
        ("modelopt", {"quant_algo": "MIXED_PRECISION"}, "quantized_layers is not"),
        (
            "modelopt",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "X"}}},
            "quant_algo is",
        ),
    ],
)
def test_words_that_nothing_knows_are_refused(name: str, config: dict[str, Any], message: str) -> None:
    refuse(name, config, message)


@pytest.mark.parametrize(
    ("weights", "written"),
    [
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 64}, "nvfp4-pack-quantized"),
        ({"num_bits": 4, "type": "int", "strategy": "tensor_group", "group_size": 16}, "pack-quantized"),
        ({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": False}, "float-quantized"),
        ({"num_bits": 4, "type": "int", "strategy": "tensor", "symmetric": False}, "pack-quantized"),
    ],
)
def test_schemes_that_are_not_read_are_described(weights: dict[str, Any], written: str) -> None:
    method = method_named("compressed_tensors")
    with pytest.raises(CheckpointError) as caught:
        method.scheme(info_of(), method.parse(groups_of(weights, written)))
    text = str(caught.value)
    for part in (f"{PATH}.o_proj", f"{weights['num_bits']} bits", str(weights["strategy"]), "what is read: int of 2"):
        assert part in text
    assert ("asymmetric" in text) is not weights.get("symmetric", True)


def one(config: dict[str, Any], name: str, tensors: dict[str, torch.Tensor], **layer: Any) -> None:
    linear(method_named(name), config, named(f"{PATH}.o", tensors), INPUTS, (OutputShard("o", 64),), **layer)


def test_damaged_tensors_are_refused_by_name() -> None:
    """Zero points as long as scales, groups that there are not, blocks that the configuration does not know."""
    found, _ = gptq(4, 32, reordered=True)(weight_of(64))
    loose = {**found, "qzeros": torch.full((4, 64), 7, dtype=torch.int32)}
    with pytest.raises(CheckpointError, match=r"zero points \(qzeros\) are not packed"):
        one(dict(GPTQ), "gptq", loose)
    beyond = {**found, "g_idx": found["g_idx"] + 1}
    with pytest.raises(CheckpointError, match="g_idx names groups that there are not"):
        one(dict(GPTQ), "gptq", beyond)
    with pytest.raises(CheckpointError, match="does not fit"):
        one(with_config(GPTQ, group_size=64), "gptq", found)
    blocks, _ = fp8((32, 32), suffix="weight_scale_inv")(weight_of(64))
    with pytest.raises(CheckpointError, match=r"'weight_scale_inv' has the shape \[2, 4\]"):
        one({}, "fp8_checkpoint", blocks)
    with pytest.raises(CheckpointError, match="one number for each block of 64 outputs and 64 inputs"):
        one({"weight_block_size": [64, 64]}, "fp8_checkpoint", blocks)


def test_zero_points_follow_the_configuration() -> None:
    """More or fewer than it says are named, with the layer."""
    symmetric = compressed(W4, "pack-quantized")(weight_of(64))[0]
    asymmetric = compressed({**W4, "symmetric": False}, "pack-quantized")(weight_of(64))[0]
    config = groups_of(W4, "pack-quantized")
    with pytest.raises(CheckpointError, match=r"o \(layer layer\): it has a weight_zero_point, .* symmetric"):
        one(config, "compressed_tensors", asymmetric)
    with pytest.raises(CheckpointError, match=r"o \(layer layer\): it lacks a weight_zero_point, .* asymmetric"):
        one(groups_of({**W4, "symmetric": False}, "pack-quantized"), "compressed_tensors", symmetric)


@pytest.mark.parametrize(
    ("name", "tensors", "layer"),
    [
        ("awq", awq(32)(weight_of(64))[0], {"parallel": Parallel.COLUMN, "rank": Rank(0, 16)}),
        ("gptq", gptq(4, 32)(weight_of(64))[0], {"parallel": Parallel.ROW, "rank": Rank(1, 32)}),
        ("modelopt", nvfp4()(weight_of(64))[0], {"parallel": Parallel.ROW, "rank": Rank(1, 128)}),
    ],
    ids=["awq", "gptq", "nvfp4"],
)
def test_cuts_through_a_packed_number_are_refused(name: str, tensors: Any, layer: dict[str, Any]) -> None:
    config = next(dict(kind.config) for key, kind in FORMATS.items() if key in (name, f"{name}-4", f"{name}-nvfp4"))
    with pytest.raises(JackfieldError, match="are not whole groups of") as caught:
        one(config, name, tensors, **layer)
    assert "use fewer ranks" in caught.value.remedy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_computation_types(dtype: torch.dtype) -> None:
    found, meaning = gptq(4, 32)(weight_of(64))
    tensors = named(f"{PATH}.o", found)
    layer = linear(method_named("gptq"), GPTQ, tensors, INPUTS, (OutputShard("o", 64),), dtype=dtype)
    assert torch.equal(layer.scheme.dequantize(layer), meaning.to(dtype))


def test_conversion_of_quantized_checkpoints_is_refused() -> None:
    (reason,) = method_named("gptq").check(QuantizationRequest(kind="gptq", online="fp8"))
    assert reason.detail == "gptq does not convert weights to 'fp8'"
