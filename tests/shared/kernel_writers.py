"""Writers of formats whose order of numbers some kernel chose, number by number. Legend: O outputs, I inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from plain_writers import (
    AWQ_PLACES,
    E2M1,
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


def groups_of_inputs(weight: torch.Tensor, group: int) -> torch.Tensor:
    return torch.arange(weight.shape[1]) // (group if group > 0 else weight.shape[1])


def padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return values with zeros behind them along the last dimension."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % multiple))


def gemv(group: int) -> Writer:
    """Return a writer of AWQ's ``gemv``; groups are padded to words."""

    def write(weight: torch.Tensor) -> Written:
        order = groups_of_inputs(weight, group)
        numbers, scale, zero = whole_numbers(weight, 4, order, symmetric=False)
        tensors = {"qweight": pack_bits(numbers, 4), "qzeros": pack_bits(padded(zero, 32), 4)}
        tensors["scales"] = padded(scale, 32).half()
        return tensors, (numbers - zero[:, order]) * scale[:, order]

    return write


def gemv_fast(group: int) -> Writer:
    """Return a writer of AWQ's ``gemv_fast``: four rows lie in a word of 16 bits."""

    def write(weight: torch.Tensor) -> Written:
        outputs, inputs = weight.shape
        order = groups_of_inputs(weight, group)
        numbers, scale, zero = whole_numbers(weight, 4, order, symmetric=False)
        moved = torch.zeros_like(numbers)
        for column in range(inputs):
            start, rest = column // 32 * 32, column % 32
            a, b, h = rest // 8, rest % 8 // 2, rest % 2
            moved[:, start + 8 * b + 4 * h + a] = numbers[:, column]
        words = torch.zeros(outputs // 4, inputs, dtype=torch.int64)
        for row in range(outputs):
            for column in range(inputs):
                place = column // 64 * 256 + row % 4 * 64 + column % 64
                words[row // 4, place // 4] |= int(moved[row, column]) << (4 * (place % 4))
        base = -(scale * zero).half()
        tensors = {
            "qweight": torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16),
            "scales": padded(scale, 32).half().t().contiguous(),
            "qzeros": padded(base, 32).t().contiguous(),
        }
        return tensors, numbers * scale[:, order] + base.float()[:, order]

    return write


def marlin(group: int) -> Writer:
    """Return a writer of Marlin's files, thread by thread."""

    def write(weight: torch.Tensor) -> Written:
        outputs, inputs = weight.shape
        order = groups_of_inputs(weight, group)
        numbers, scale, _ = whole_numbers(weight, 4, order, symmetric=True)
        words = torch.zeros(inputs // 16, 2 * outputs, dtype=torch.int64)
        for i in range(inputs // 16):
            for j in range(outputs // 64):
                for thread in range(32):
                    for tile in range(4):
                        first = 16 * i + 2 * (thread % 4)
                        column = 64 * j + 16 * tile + thread // 4
                        mine = [numbers[column + 8 * b, first + r] for b in (0, 1) for r in (0, 1, 8, 9)]
                        word = sum(int(mine[n]) << 4 * place for place, n in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
                        words[i, 128 * j + 4 * thread + tile] = word
        many = scale.shape[1] > 1
        places = [a + 8 * b for a in range(8) for b in range(8)]
        single = [2 * a + b for a in range(4) for b in (0, 1, 8, 9, 16, 17, 24, 25)]
        block, picked = (64, places) if many else (32, single)
        stored = scale.t().reshape(-1, block)[:, picked].reshape(scale.shape[1], outputs)
        tensors = {"qweight": words.to(torch.uint32).view(torch.int32), "scales": stored.half().contiguous()}
        return tensors, (numbers - 8) * scale[:, order]

    return write


def sparse(inner: Writer | None = None) -> Writer:
    """Return a writer of what another writes, two of four neighbouring inputs being 0."""

    def write(weight: torch.Tensor) -> Written:
        kept = weight.abs().unflatten(1, (-1, 4)).argsort(-1).argsort(-1).flatten(1) >= 2
        tensors, meaning = (inner or plain)(weight * kept)
        whole = tensors.pop("weight")
        raw = whole.view(torch.uint8) if whole.element_size() == 1 else whole
        tensors["compressed"] = raw[kept].reshape(len(weight), -1).view(whole.dtype)
        tensors["bitmask"] = torch.from_numpy(np.packbits(kept.numpy(), axis=-1, bitorder="little"))
        tensors["shape"] = torch.tensor(weight.shape).reshape(-1, 1)
        return tensors, meaning

    return write


def plain(weight: torch.Tensor) -> Written:
    return {"weight": weight}, weight


def channels(kind: torch.dtype, most: int) -> Writer:
    """Return a writer of numbers of one byte with a scale for each output."""

    def write(weight: torch.Tensor) -> Written:
        scale = weight.abs().amax(1, keepdim=True) / most
        scaled = weight / scale
        stored = (scaled.round() if kind == torch.int8 else scaled).to(kind)
        return {"weight": stored, "weight_scale": scale}, stored.float() * scale

    return write


def quark_words(group: int, *, signed: bool, symmetric: bool = False, reordered: bool = True) -> Writer:
    """Return a writer of Quark's ``int4`` and ``uint4`` in groups: transposed, eight outputs to a word."""

    def pack(columns: torch.Tensor) -> torch.Tensor:
        places = list(AWQ_PLACES) if reordered else list(range(8))
        return pack_bits((columns & 15).unflatten(-1, (-1, 8))[..., places].flatten(-2), 4)

    def write(weight: torch.Tensor) -> Written:
        order = groups_of_inputs(weight, group)
        numbers, scale, zero = whole_numbers(weight, 4, order, symmetric=symmetric)
        less = 8 if signed else 0
        tensors = {"weight": pack((numbers - less).t()), "weight_scale": scale.t().contiguous()}
        if not symmetric:
            tensors["weight_zero_point"] = pack((zero - less).t())
        return tensors, (numbers - zero[:, order]) * scale[:, order]

    return write


def six_bits(exponents: int) -> Writer:
    """Return a writer of floats of six bits in blocks of 32 that share an exponent."""
    mantissa = 5 - exponents
    bias = (1 << (exponents - 1)) - 1

    def number(code: int) -> float:
        sign, power, rest = 1 - 2 * (code >> 5), code >> mantissa & ((1 << exponents) - 1), code & ((1 << mantissa) - 1)
        part = rest / (1 << mantissa)
        return sign * (part * 2.0 ** (1 - bias) if power == 0 else (1 + part) * 2.0 ** (power - bias))

    def write(weight: torch.Tensor) -> Written:
        table = torch.tensor([number(code) for code in range(64)])
        blocks = weight.unflatten(1, (-1, 32))
        power = torch.floor(torch.log2(blocks.abs().amax(-1))) - (2 if exponents == 2 else 4)
        wide = 2.0 ** power.unsqueeze(-1)
        codes = ((blocks / wide).unsqueeze(-1) - table).abs().argmin(-1)
        threes = codes.flatten(1).unflatten(1, (-1, 4))
        joined = sum(threes[..., place] << (6 * place) for place in range(4))
        stored = torch.stack([joined >> shift & 255 for shift in (0, 8, 16)], -1).flatten(1)
        tensors = {"weight": stored.to(torch.uint8), "weight_scale": (power + 127).to(torch.uint8)}
        return tensors, (table[codes] * wide).flatten(1)

    return write


def awq_of_modelopt(group: int, *, second: bool = False) -> Writer:
    """Return a writer of ModelOpt's four-bit AWQ: two outputs to a byte, and factors of the inputs."""

    def write(weight: torch.Tensor) -> Written:
        order = groups_of_inputs(weight, group)
        numbers, scale, _ = whole_numbers(weight, 4, order, symmetric=True)
        codes = ((numbers - 8) & 15).to(torch.uint8)
        prepared = torch.linspace(0.5, 2.0, weight.shape[1])
        tensors = {"weight": codes[0::2] | codes[1::2] << 4, "weight_scale": scale, "pre_quant_scale": prepared}
        if second:
            tensors["weight_scale_2"] = torch.tensor(0.125)
        return tensors, (numbers - 8) * scale[:, order] * prepared

    return write


def global_nvfp4(weight: torch.Tensor) -> Written:
    """Write NVFP4 with a scale for the whole matrix that the others are divided by."""
    blocks = weight.unflatten(1, (-1, 16))
    whole = 448 * 6 / weight.abs().max()
    scale = (blocks.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    wide = (scale.float() / whole).unsqueeze(-1).clamp(min=1e-12)
    codes = four_bit_floats(blocks / wide)
    tensors: Tensors = {"weight_packed": pairs(codes.flatten(1)), "weight_scale": scale}
    tensors["weight_global_scale"] = whole.reshape(1)
    return tensors, (value_of(codes) * wide).flatten(1)


def shared_exponents(weight: torch.Tensor) -> Written:
    """Write four-bit floats in blocks of 32 that share an exponent, as AutoRound names them."""
    blocks = weight.unflatten(1, (-1, 32))
    power = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    wide = 2.0 ** power.unsqueeze(-1)
    codes = four_bit_floats(blocks / wide)
    tensors = {"weight_packed": pairs(codes.flatten(1)), "weight_scale": (power + 127).to(torch.uint8)}
    assert float((blocks / wide).abs().max()) < 2 * max(E2M1)
    return tensors, (value_of(codes) * wide).flatten(1)


def _awq(version: str, write: Writer, group: int = 32) -> Format:
    return Format("awq", {"quant_method": "awq", "bits": 4, "group_size": group, "version": version}, write)


def _sparse(inner: Writer | None = None, **weights: Any) -> Format:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel", **weights}}}
    config = {
        "quant_method": "compressed-tensors",
        "format": f"{weights.get('type', 'int')}-quantized" if inner else "dense",
        "config_groups": groups if inner else {},
        "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]},
    }
    return Format("compressed_tensors", config, sparse(inner))


def _quark(dtype: str, write: Writer, group: int = 32, method: str = "reorder", **others: Any) -> Format:
    weight = {"dtype": dtype, "qscheme": "per_group", "group_size": group, "scale_format": "e8m0", **others}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "export": {"pack_method": method}}
    return Format("quark", config, write)


def _auto_round(data_type: str, write: Writer, **others: Any) -> Format:
    config = {"quant_method": "auto-round", "data_type": data_type, "sym": True, **others}
    return Format("auto_round", config, write)


def _modelopt(algorithm: str, write: Writer) -> Format:
    return Format("modelopt", {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 32}, write)


FP8, INT8 = channels(torch.float8_e4m3fn, 448), channels(torch.int8, 127)

KERNEL_FORMATS: dict[str, Format] = {
    "awq-gemv": _awq("gemv", gemv(32)),
    "awq-gemv-fast": _awq("gemv_fast", gemv_fast(32)),
    "ct-sparse": _sparse(),
    "ct-sparse-fp8": _sparse(FP8, type="float"),
    "ct-sparse-int8": _sparse(INT8, type="int"),
    "quark-int4": _quark("int4", quark_words(32, signed=True, symmetric=True), symmetric=True),
    "quark-int4-in-order": _quark(
        "int4", quark_words(32, signed=True, reordered=False), method="order", symmetric=False
    ),
    "quark-uint4": _quark("uint4", quark_words(64, signed=False), 64, symmetric=False),
    "quark-mxfp6": _quark("fp6_e2m3", six_bits(2)),
    "quark-mxfp6-wide": _quark("fp6_e3m2", six_bits(3)),
    "modelopt-int4-awq": _modelopt("W4A16_AWQ", awq_of_modelopt(32)),
    "modelopt-int4-fp8-awq": _modelopt("W4A8_AWQ", awq_of_modelopt(64, second=True)),
    "modelopt-int8-prepared": _modelopt("W8A8_SQ_PER_CHANNEL", INT8),
    "auto-round-mxfp4": _auto_round(
        "mx_fp", shared_exponents, bits=4, group_size=32, packing_format="auto_round:mx_fp"
    ),
    "auto-round-nvfp4": _auto_round(
        "nv_fp4_with_static_gs", global_nvfp4, bits=4, group_size=16, packing_format="auto_round:llm_compressor"
    ),
    "auto-round-fp8": _auto_round("fp8", FP8, bits=8, group_size=-1, packing_format="auto_round:fp8_static"),
}
"""Forms of formats that are named by their kernels, and others that numbers are put into another order for."""
