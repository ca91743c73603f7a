"""Writes matrices in the exact form of each checkpoint format, and says what they mean.

Where the format's own library runs on a CPU it writes and it decodes; elsewhere numbers are packed bit by bit, in the
slowest and plainest way. Legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from kernel_writers import KERNEL_FORMATS
from plain_writers import (
    AWQ_PLACES,
    Format,
    Tensors,
    Writer,
    Written,
    four_bit_floats,
    pack_bits,
    pairs,
    value_of,
    whole_numbers,
)


def gptq(bits: int, group: int, *, symmetric: bool = True, reordered: bool = False, plus: int = 1) -> Writer:
    """Return a writer of GPTQ; ``plus`` is what zero points are stored less by."""

    def write(weight: torch.Tensor) -> Written:
        inputs = weight.shape[1]
        order = torch.arange(inputs) // (group if group > 0 else inputs)
        if reordered:
            order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
        numbers, scale, zero = whole_numbers(weight, bits, order, symmetric)
        tensors = {
            "qweight": pack_bits(numbers, bits).t().contiguous(),
            "qzeros": pack_bits(((zero - plus) & ((1 << bits) - 1)).t(), bits),
            "scales": scale.t().half().contiguous(),
            "g_idx": order.int(),
        }
        return tensors, (numbers - zero[:, order]) * scale[:, order]

    return write


def awq(group: int) -> Writer:
    """Return a writer of AWQ's gemm version."""

    def pack(columns: torch.Tensor) -> torch.Tensor:
        return pack_bits(columns.unflatten(-1, (-1, 8))[..., list(AWQ_PLACES)].flatten(-2), 4)

    def write(weight: torch.Tensor) -> Written:
        order = torch.arange(weight.shape[1]) // group
        numbers, scale, zero = whole_numbers(weight, 4, order, symmetric=False)
        tensors = {"qweight": pack(numbers.t()), "qzeros": pack(zero.t()), "scales": scale.t().half().contiguous()}
        return tensors, (numbers - zero[:, order]) * scale[:, order]

    return write


def fp8(block: tuple[int, int] | str, *, suffix: str = "weight_scale", static: bool = False) -> Writer:
    """Return a writer of 8-bit floats; ``block`` is ``tensor``, ``channel``, ``flat`` (channel, [O]) or a size."""

    def write(weight: torch.Tensor) -> Written:
        outputs, inputs = weight.shape
        sizes = {"tensor": (outputs, inputs), "channel": (1, inputs), "flat": (1, inputs)}
        rows, columns = sizes[block] if isinstance(block, str) else block
        scale = torch.zeros(-(-outputs // rows), -(-inputs // columns))
        wide = torch.zeros_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scale[i, j] = weight[part].abs().max() / 448
                wide[part] = scale[i, j]
        stored = (weight / wide).to(torch.float8_e4m3fn)
        found = {"weight": stored, suffix: _shaped(scale, block)}
        if static:
            found["input_scale"] = torch.tensor(0.25)
        return found, stored.float() * wide

    return write


def _shaped(scale: torch.Tensor, block: object) -> torch.Tensor:
    if block == "tensor":
        return scale.reshape(())
    return scale.reshape(-1) if block == "flat" else scale


def nvfp4(*, prepared: bool = False) -> Writer:
    """Return a writer of ModelOpt's NVFP4; with ``prepared``, activations are to be multiplied by a factor each."""

    def write(weight: torch.Tensor) -> Written:
        blocks = weight.unflatten(1, (-1, 16))
        second = weight.abs().max() / (448 * 6)
        scale = (blocks.abs().amax(-1) / 6 / second).to(torch.float8_e4m3fn)
        wide = (scale.float() * second).unsqueeze(-1).clamp(min=1e-12)
        codes = four_bit_floats(blocks / wide)
        tensors = {"weight": pairs(codes.flatten(1)), "weight_scale": scale, "weight_scale_2": second.reshape(())}
        tensors["input_scale"] = torch.tensor(0.5)
        found = (value_of(codes) * wide).flatten(1)
        if prepared:
            tensors["pre_quant_scale"] = torch.linspace(0.5, 2.0, weight.shape[1])
            found = found * tensors["pre_quant_scale"]
        return tensors, found

    return write


def mxfp8(weight: torch.Tensor) -> Written:
    """Write 8-bit floats in blocks of 32 that share an exponent."""
    blocks = weight.unflatten(1, (-1, 32))
    exponent = (torch.floor(torch.log2(blocks.abs().amax(-1))) - 8).clamp(-127, 127)
    wide = 2.0 ** exponent.unsqueeze(-1)
    stored = (blocks / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = (exponent + 127).to(torch.uint8)
    return {"weight": stored.flatten(1), "weight_scale": scale}, (stored.float() * wide).flatten(1)


def compressed(weights: Mapping[str, Any], written: str) -> Writer:
    """Return a writer that is the compressed-tensors library."""

    def write(weight: torch.Tensor) -> Written:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(written)
        state = compressor.compress({"weight": weight, **_parameters(weight, args)}, scheme)
        state = {name: tensor.contiguous() for name, tensor in state.items()}
        if args.type == "float" and args.num_bits < 8:
            return state, _wide_meaning(compressor, state, args)
        return state, compressor.decompress(dict(state), scheme)["weight"].float()

    return write


def _wide_meaning(compressor: Any, state: Tensors, args: Any) -> torch.Tensor:
    """Return what the library's ``decompress`` does in bfloat16, in float32."""
    from compressed_tensors.compressors.mxfp6.helpers import unpack_fp6_from_uint8
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed, wide = state["weight_packed"], torch.float32
    inputs = packed.shape[1] * 8 // args.num_bits
    unpack = unpack_fp4_from_uint8 if args.num_bits == 4 else unpack_fp6_from_uint8
    numbers = unpack(packed, packed.shape[0], inputs).to(wide)
    scale = compressor._decompress_scale(state["weight_scale"], wide)
    found: torch.Tensor = dequantize(
        x_q=numbers, scale=scale, args=args, global_scale=state.get("weight_global_scale"), dtype=wide
    )
    return found


def _parameters(weight: torch.Tensor, args: Any) -> Tensors:
    """Return scale, zero point and global scale, as the library computes them."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    outputs, inputs = weight.shape
    if args.strategy == "tensor":
        least, most = weight.min().reshape(1), weight.max().reshape(1)
    elif args.strategy == "channel":
        least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        blocks = weight.unflatten(1, (-1, args.group_size))
        least, most = blocks.amin(-1), blocks.amax(-1)
    found: Tensors = {}
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(least, most, args, found.get("weight_global_scale"))
    return {**found, "weight_scale": scale, "weight_zero_point": zero}


def bits_and_bytes(kind: str, *, nested: bool, kept_as: torch.dtype = torch.uint8) -> Writer:
    """Return a writer that is the bitsandbytes library, for ``nf4``, ``fp4`` and ``int8``; ``kept_as``: type of packed
    numbers.
    """

    def write(weight: torch.Tensor) -> Written:
        import bitsandbytes.functional as library

        if kind == "int8":
            stored, scales, _ = library.int8_vectorwise_quant(weight.half())
            return {"weight": stored, "SCB": scales}, library.int8_vectorwise_dequant(stored, scales).float()
        stored, state = library.quantize_4bit(
            weight, quant_type=kind, compress_statistics=nested, quant_storage=kept_as
        )
        found = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        return {"weight": stored, **found}, library.dequantize_4bit(stored, state).float()

    return write


def hqq(bits: int, group: int, axis: int = 1) -> Writer:
    """Return a writer of HQQ: groups of the flattened matrix are rows or columns, packed along the first dimension with
    numbers that lie equally far apart, the first in the highest bits.
    """

    def write(weight: torch.Tensor) -> Written:
        grouped = weight.reshape(-1, group) if axis == 1 else weight.reshape(group, -1)
        dim, top = axis, (1 << bits) - 1
        least, most = grouped.amin(dim, keepdim=True), grouped.amax(dim, keepdim=True)
        scale = ((most - least) / top).half()
        zero = (-least / scale.float()).half()
        numbers = (grouped / scale.float() + zero.float()).round().clamp(0, top)
        settings = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": 1, "optimize": 1}
        found = {name: torch.tensor(value, dtype=torch.int32) for name, value in settings.items()}
        word = "3bit_32" if bits == 3 else f"{bits}bit_u8"
        found["packing"] = torch.tensor([ord(letter) for letter in word], dtype=torch.uint8)
        for name in ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "round_zero"):
            found[name] = torch.tensor(0, dtype=torch.uint8)
        for name in ("encoded_state_dict", "stores_quant_config"):
            found[name] = torch.tensor(1, dtype=torch.uint8)
        found |= {"W_q": _strided(numbers.int(), bits), "scale": scale, "zero": zero}
        found["shape"] = torch.tensor(weight.shape)
        return found, ((numbers - zero.float()) * scale.float()).reshape(weight.shape)

    return write


def _strided(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack rows ``step`` apart into one."""
    count = 10 if bits == 3 else 8 // bits
    step = -(-len(numbers) // count)
    found = torch.zeros((step, numbers.shape[1]), dtype=torch.int32)
    for place, rows in enumerate(numbers.split(step)):
        found[: len(rows)] |= rows << (bits * (count - 1 - place))
    return found if bits == 3 else found.to(torch.uint8)


def mxfp4(weight: torch.Tensor) -> Written:
    """Write four-bit floats in blocks of 32 that share an exponent."""
    blocks = weight.unflatten(1, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    wide = 2.0 ** exponent.unsqueeze(-1)
    codes = four_bit_floats(blocks / wide)
    tensors = {"weight": pairs(codes.flatten(1)), "weight_scale": (exponent + 127).to(torch.uint8)}
    return tensors, (value_of(codes) * wide).flatten(1)


def int8(weight: torch.Tensor) -> Written:
    """Write whole numbers of eight bits with a scale for each output, [O]."""
    scale = weight.abs().amax(1) / 127
    stored = (weight / scale.unsqueeze(1)).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored * scale.unsqueeze(1)


def groups_of(weights: Mapping[str, Any], written: str, **others: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": dict(weights)}
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **others,
    }


def _packed(bits: int, strategy: str, *, symmetric: bool = True, group: int | None = None) -> Format:
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, "group_size": group}
    return Format("compressed_tensors", groups_of(weights, "pack-quantized"), compressed(weights, "pack-quantized"))


def _typed(kind: str, strategy: str, written: str, **others: Any) -> Format:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, **others}
    return Format("compressed_tensors", groups_of(weights, written), compressed(weights, written))


def _floats(bits: int, strategy: str, group: int, written: str, **others: Any) -> Format:
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group, **others}
    return Format("compressed_tensors", groups_of(weights, written), compressed(weights, written))


def _gptq(bits: int, group: int, **others: Any) -> Format:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": others.get("reordered", False),
        "sym": others.get("symmetric", True),
        "checkpoint_format": "gptq" if others.get("plus", 1) else "gptq_v2",
    }
    return Format("gptq", config, gptq(bits, group, **others))


def _modelopt(algorithm: str, write: Writer) -> Format:
    return Format(
        "modelopt", {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head"]}, write
    )


def _fp8(write: Writer, **config: Any) -> Format:
    return Format("fp8_checkpoint", {"quant_method": "fp8", "ignored_layers": ["lm_head"], **config}, write)


def _bits_and_bytes(kind: str, *, nested: bool = False) -> Format:
    bits = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Format("bitsandbytes", {"quant_method": "bitsandbytes", **bits}, bits_and_bytes(kind, nested=nested))


def _quark(dtype: str, scheme: str, write: Writer, **others: Any) -> Format:
    weight = {"dtype": dtype, "qscheme": scheme, "is_dynamic": False, **others}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["lm_head"]}
    return Format("quark", config, write)


def _quark_nvfp4() -> Format:
    """Return the format of four-bit floats whose scales are rounded in a second step."""
    numbers = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "is_dynamic": False}
    scales = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    inputs = [{**numbers, "is_dynamic": True}, scales]

    def write(weight: torch.Tensor) -> Written:
        tensors, meaning = nvfp4()(weight)
        tensors["input_scale_2"] = tensors.pop("input_scale")
        return tensors, meaning

    group = {"weight": [numbers, scales], "input_tensors": inputs}
    return Format("quark", {"quant_method": "quark", "global_quant_config": group, "exclude": ["lm_head"]}, write)


def _auto_round(packing: str, write: Writer, **others: Any) -> Format:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": packing, **others}
    return Format("auto_round", config, write)


MX = {"scale_dtype": "torch.uint8"}


def ao_typed(writer: Writer) -> Writer:
    """Return a writer of numbers with scales under torchao's names."""

    def write(weight: torch.Tensor) -> Written:
        found, meaning = writer(weight)
        scale = found["weight_scale"].float()
        scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
        return {"_weight_qdata": found["weight"], "_weight_scale": scale}, meaning

    return write


def ao_whole(bits: int, group: int, *, prepared: bool = False) -> Writer:
    """Return a writer of whole numbers in bytes, with a scale and a zero point for each group of inputs."""

    def write(weight: torch.Tensor) -> Written:
        inputs = weight.shape[1]
        columns = torch.arange(inputs)
        values, scale, zero = whole_numbers(weight, bits, columns // (group or inputs), False)
        half = 1 << (bits - 1)
        found = {"_weight_qdata": values - half, "_weight_scale": scale, "_weight_zero_point": zero - half}
        found = {name: tensor.to(torch.float32 if "scale" in name else torch.int8) for name, tensor in found.items()}
        groups = columns // (group or inputs)
        meaning = (values.float() - zero.float()[:, groups]) * scale[:, groups]
        if prepared:
            found["_weight_act_pre_scale"] = torch.linspace(0.5, 2.0, inputs)
            meaning = meaning * found["_weight_act_pre_scale"]
        return found, meaning

    return write


def ao_pairs(group: int) -> Writer:
    """Return a writer of two whole numbers in a byte; scales and what 0 stands for are [groups, outputs]."""

    def write(weight: torch.Tensor) -> Written:
        groups = torch.arange(weight.shape[1]) // group
        values, scale, zero = whole_numbers(weight, 4, groups, False)
        signed, base = values - 8, (8 - zero.float()) * scale
        found = {
            "_weight_qdata": pairs(signed & 15).to(torch.uint8).view(torch.int8),
            "_weight_scale": scale.t().contiguous(),
            "_weight_zero_point": base.t().contiguous(),
        }
        return found, signed.float() * scale[:, groups] + base[:, groups]

    return write


def _torchao(kind: str, write: Writer) -> Format:
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}, "_version": 2}}}
    return Format("torchao", config, write)


FORMATS: dict[str, Format] = {
    "fp8-tensor": _fp8(fp8("tensor"), activation_scheme="dynamic"),
    "fp8-static": _fp8(fp8("tensor", static=True), activation_scheme="static"),
    "fp8-channel": _fp8(fp8("channel")),
    "fp8-block": _fp8(fp8((32, 32), suffix="weight_scale_inv"), weight_block_size=[32, 32]),
    "fp8-odd-block": _fp8(fp8((24, 40), suffix="weight_scale_inv"), weight_block_size=[24, 40]),
    "fbgemm": Format("fp8_checkpoint", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8("channel")),
    "modelopt-fp8": _modelopt("FP8", fp8("tensor", static=True)),
    "modelopt-fp8-channel": _modelopt("FP8_PER_CHANNEL_PER_TOKEN", fp8("flat")),
    "modelopt-fp8-block": _modelopt("FP8_PB_WO", fp8((128, 128))),
    "modelopt-nvfp4": _modelopt("NVFP4", nvfp4()),
    "modelopt-nvfp4-awq": _modelopt("NVFP4_AWQ", nvfp4(prepared=True)),
    "modelopt-mxfp8": _modelopt("MXFP8", mxfp8),
    "gptq-2": _gptq(2, 32, symmetric=False),
    "gptq-3": _gptq(3, 32),
    "gptq-4": _gptq(4, 32),
    "gptq-4-wide": _gptq(4, 64, symmetric=False),
    "gptq-4-whole": _gptq(4, -1),
    "gptq-4-order": _gptq(4, 32, reordered=True),
    "gptq-4-v2": _gptq(4, 32, symmetric=False, plus=0),
    "gptq-8": _gptq(8, 32, symmetric=False),
    "gptq-8-symmetric": _gptq(8, 32),
    "awq": Format("awq", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(32)),
    "ct-w4-group": _packed(4, "group", group=32),
    "ct-w4-asymmetric": _packed(4, "group", symmetric=False, group=32),
    "ct-w4-channel": _packed(4, "channel"),
    "ct-w3-group": _packed(3, "group", symmetric=False, group=32),
    "ct-w5-group": _packed(5, "group", group=32),
    "ct-w8-group": _packed(8, "group", group=64),
    "ct-w8-channel-asymmetric": _packed(8, "channel", symmetric=False),
    "ct-int8-channel": _typed("int", "channel", "int-quantized"),
    "ct-int8-asymmetric": _typed("int", "channel", "int-quantized", symmetric=False),
    "ct-int8-tensor": _typed("int", "tensor", "naive-quantized"),
    "ct-fp8-tensor": _typed("float", "tensor", "float-quantized"),
    "ct-fp8-channel": _typed("float", "channel", "float-quantized"),
    "ct-fp8-block": _typed("float", "block", "float-quantized", block_structure=[32, 32]),
    "ct-fp8-naive": _typed("float", "channel", "naive-quantized"),
    "ct-nvfp4": _floats(4, "tensor_group", 16, "nvfp4-pack-quantized", scale_dtype="torch.float8_e4m3fn"),
    "ct-mxfp4": _floats(4, "group", 32, "mxfp4-pack-quantized", **MX),
    "ct-mxfp6": _floats(6, "group", 32, "mxfp6-pack-quantized", **MX),
    "ct-mxfp8": _floats(8, "group", 32, "mxfp8-quantized", **MX),
    "bnb-nf4": _bits_and_bytes("nf4"),
    "bnb-nf4-nested": _bits_and_bytes("nf4", nested=True),
    "bnb-fp4": _bits_and_bytes("fp4"),
    "bnb-nf4-wide": Format(
        "bitsandbytes",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
        bits_and_bytes("nf4", nested=True, kept_as=torch.bfloat16),
    ),
    "bnb-int8": _bits_and_bytes("int8"),
    "auto-round": _auto_round("auto_round", gptq(4, 32, symmetric=False, plus=0)),
    "auto-round-gptq": _auto_round("auto_round:auto_gptq", gptq(4, 32)),
    "auto-round-awq": _auto_round("auto_round:auto_awq", awq(32)),
    "quark-fp8": _quark("fp8_e4m3", "per_tensor", fp8("tensor", static=True)),
    "quark-fp8-channel": _quark("fp8_e4m3", "per_channel", fp8("flat")),
    "quark-int8": _quark("int8", "per_channel", int8),
    "quark-mxfp4": _quark("fp4", "per_group", mxfp4, group_size=32, scale_format="e8m0"),
    "hqq-4": Format("hqq", {"quant_method": "hqq"}, hqq(4, 64)),
    "hqq-8": Format("hqq", {"quant_method": "hqq"}, hqq(8, 64)),
    "hqq-3": Format("hqq", {"quant_method": "hqq"}, hqq(3, 64)),
    "hqq-2-columns": Format("hqq", {"quant_method": "hqq"}, hqq(2, 16, axis=0)),
    "ao-fp8-channel": _torchao("Float8WeightOnlyConfig", ao_typed(fp8("channel"))),
    "ao-fp8-tensor": _torchao("Float8DynamicActivationFloat8WeightConfig", ao_typed(fp8("tensor"))),
    "ao-fp8-block": _torchao("Float8DynamicActivationFloat8WeightConfig", ao_typed(fp8((32, 32)))),
    "ao-int8": _torchao("Int8WeightOnlyConfig", ao_typed(int8)),
    "ao-int8-zeros": _torchao("IntxWeightOnlyConfig", ao_whole(8, 0)),
    "ao-int4-bytes": _torchao("IntxWeightOnlyConfig", ao_whole(4, 32)),
    "ao-int4-prepared": _torchao("IntxWeightOnlyConfig", ao_whole(4, 64, prepared=True)),
    "ao-int4-pairs": _torchao("Int4WeightOnlyConfig", ao_pairs(32)),
    "hqq-1": Format("hqq", {"quant_method": "hqq"}, hqq(1, 16)),
    "fp8-mx": Format("fp8_checkpoint", {"quant_method": "mxfp8"}, mxfp8),
    "modelopt-mxfp4": _modelopt("W4A8_MXFP4_FP8", mxfp4),
    "modelopt-nvfp4-fp8": _modelopt("W4A8_NVFP4_FP8", nvfp4()),
    "modelopt-int8": _modelopt("W8A16", int8),
    "quark-fp8-block": _quark("fp8_e4m3", "per_block", fp8((32, 32)), block_size=[32, 32]),
    "quark-mxfp8": _quark("fp8_e4m3", "per_group", mxfp8, group_size=32, scale_format="e8m0"),
    "quark-nvfp4": _quark_nvfp4(),
    **KERNEL_FORMATS,
}
"""Every format that is read."""
