from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as gguf_dequantize

from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    Band,
    LayerInfo,
    OutputShard,
    Parallel,
    QuantizationRequest,
    RankInfo,
    TensorFacts,
)
from jackfield_quantization.gguf import NOT_WEIGHTS, PACKED_TYPES, PLAIN_TYPES, Gguf
from jackfield_quantization.gguf_scheme import CHUNK_VALUES, block_of, dequantize_into

GOLDEN = Path(__file__).parent / "golden"
Array = np.ndarray[Any, np.dtype[Any]]


class Holder:
    """The least a layer can be."""

    def __init__(self, info: LayerInfo, parameters: Mapping[str, torch.Tensor]) -> None:
        self.info = info
        self.parameters = dict(parameters)

    def get_parameter(self, target: str) -> torch.Tensor:
        return self.parameters[target]

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = dict(parameters)


def decode(packed: Array, word: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values, nbytes = block_of(word)
    shape = (*packed.shape[:-1], packed.shape[-1] // nbytes * values)
    out = torch.full(shape, torch.nan, dtype=dtype)
    dequantize_into(torch.from_numpy(packed), word, out)
    return out


def half(raw: bytes) -> np.float32:
    return np.float32(struct.unpack("<e", raw)[0])


# Brute-force decoders, one value at a time, written from the block structures of GGML.


def scalar_q4_0(block: bytes) -> Iterator[np.float32]:
    scale, nibbles = half(block[:2]), block[2:]
    for shift in (0, 4):
        for byte in nibbles:
            yield scale * np.float32((byte >> shift & 15) - 8)


def scalar_q4_1(block: bytes) -> Iterator[np.float32]:
    scale, least, nibbles = half(block[:2]), half(block[2:4]), block[4:]
    for shift in (0, 4):
        for byte in nibbles:
            yield scale * np.float32(byte >> shift & 15) + least


def scalar_q8_0(block: bytes) -> Iterator[np.float32]:
    scale = half(block[:2])
    for value in struct.unpack("<32b", block[2:]):
        yield scale * np.float32(value)


def scalar_q6_k(block: bytes) -> Iterator[np.float32]:
    low, high, scales, scale = block[:128], block[128:192], struct.unpack("<16b", block[192:208]), half(block[208:])
    for index in range(256):
        part, place = divmod(index, 128)
        quarter, column = divmod(place, 32)
        nibble = low[64 * part + 32 * (quarter % 2) + column] >> (4 * (quarter // 2)) & 15
        top = high[32 * part + column] >> (2 * quarter) & 3
        yield scale * np.float32(scales[index // 16]) * np.float32((nibble | top << 4) - 32)


SCALAR = {"Q4_0": scalar_q4_0, "Q4_1": scalar_q4_1, "Q8_0": scalar_q8_0, "Q6_K": scalar_q6_k}
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q6_K": (208,)}


def random_blocks(word: str, rows: int, blocks: int) -> Array:
    """Random bytes, but for finite scales."""
    rng = np.random.default_rng(len(word) + rows)
    nbytes = block_of(word)[1]
    packed = rng.integers(0, 256, (rows, blocks, nbytes), dtype=np.uint8)
    for offset in HALVES[word]:
        scales = rng.normal(size=(rows, blocks, 1)).astype("<f2")
        packed[:, :, offset : offset + 2] = scales.view(np.uint8)
    return packed.reshape(rows, blocks * nbytes)


@pytest.mark.parametrize("word", sorted(SCALAR))
def test_values_equal_a_brute_force_decoder_bit_for_bit(word: str) -> None:
    packed = random_blocks(word, rows=7, blocks=3)
    nbytes = block_of(word)[1]
    for row, got in zip(packed, decode(packed, word).numpy(), strict=True):
        blocks = (row[start : start + nbytes].tobytes() for start in range(0, len(row), nbytes))
        want = np.array([value for block in blocks for value in SCALAR[word](block)], dtype=np.float32)
        assert want.tobytes() == got.tobytes()


@pytest.mark.parametrize("word", sorted(PACKED_TYPES))
def test_golden_blocks(word: str) -> None:
    golden = json.loads((GOLDEN / f"{word}.json").read_text())
    packed = np.frombuffer(bytes.fromhex(golden["packed"]), dtype=np.uint8).reshape(1, -1).copy()
    assert decode(packed, word).numpy().astype("<f4").tobytes().hex() == golden["float32_little_endian"]


def test_every_type_that_the_package_can_dequantize_is_readable() -> None:
    def readable(kind: gguf.GGMLQuantizationType) -> bool:
        nbytes = gguf.GGML_QUANT_SIZES[kind][1]
        try:
            gguf_dequantize(np.zeros((1, nbytes), dtype=np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    theirs = {kind.name for kind in gguf.GGMLQuantizationType if readable(kind)}
    assert theirs == PACKED_TYPES | PLAIN_TYPES.keys()
    assert not NOT_WEIGHTS & theirs


def test_chunks_and_joined_rows_change_nothing() -> None:
    rows = 2 * CHUNK_VALUES // 64 + 37
    packed = random_blocks("Q8_0", rows=rows, blocks=2)
    want = gguf_dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(decode(packed, "Q8_0").numpy(), want)


def fact(name: str, word: str, shape: tuple[int, ...]) -> dict[str, TensorFacts]:
    return {"weight": TensorFacts(name, f"ggml:{word}", shape)}


def fused(dtype: str = "float32", **changes: Any) -> LayerInfo:
    """A layer of three matrices in three types."""
    values: dict[str, Any] = {
        "name": "layers.0.attn.qkv",
        "input_size": 64,
        "shards": (OutputShard("q", 8), OutputShard("k", 4), OutputShard("v", 4)),
        "parallel": Parallel.COLUMN,
        "dtype": dtype,
        "tensors": {
            "q": fact("q", "Q4_1", (8, 64)),
            "k": fact("k", "Q8_0", (4, 64)),
            "v": fact("v", "F16", (4, 64)),
        },
    }
    return LayerInfo(**(values | changes))


def test_parameters_of_a_fused_layer() -> None:
    info = fused(rank=RankInfo(1, 2))
    q, k, v = Gguf.scheme(info, None).parameters(info)
    assert (q.name, q.suffix, q.shape, q.dtype, q.input_block, q.shard) == (
        "weight_q",
        "weight",
        (4, 40),
        "uint8",
        (32, 20),
        "q",
    )
    assert (k.name, k.shape, k.dtype, k.input_block) == ("weight_k", (2, 68), "uint8", (32, 34))
    assert (v.name, v.shape, v.dtype, v.input_block) == ("weight_v", (2, 64), "float16", None)


def test_a_single_matrix_is_called_weight() -> None:
    info = fused(shards=(OutputShard("", 8),), tensors={"": fact("q", "Q4_1", (8, 64))})
    (spec,) = Gguf.scheme(info, None).parameters(info)
    assert (spec.name, spec.shard) == ("weight", "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_finalize_stacks_the_shards(dtype: str) -> None:
    info = fused(dtype)
    q, k = random_blocks("Q4_1", 8, 2), random_blocks("Q8_0", 4, 2)
    v = torch.randn(4, 64).half()
    layer = Holder(info, {"weight_q": torch.from_numpy(q), "weight_k": torch.from_numpy(k), "weight_v": v})
    scheme = Gguf.scheme(info, None)
    scheme.finalize(layer)
    want = torch.cat(
        [
            torch.from_numpy(gguf_dequantize(q, gguf.GGMLQuantizationType.Q4_1)),
            torch.from_numpy(gguf_dequantize(k, gguf.GGMLQuantizationType.Q8_0)),
            v.float(),
        ]
    ).to(getattr(torch, dtype))
    assert list(layer.parameters) == ["weight"]
    torch.testing.assert_close(scheme.dequantize(layer), want, rtol=0, atol=0)
    x, bias = torch.randn(3, 64, dtype=want.dtype), torch.randn(16, dtype=want.dtype)
    torch.testing.assert_close(scheme.apply(layer, x, bias), torch.nn.functional.linear(x, want, bias))


def test_experts_are_stacked_along_outputs() -> None:
    info = LayerInfo(
        "experts.gate_up",
        64,
        (OutputShard("gate", 4), OutputShard("up", 4)),
        Parallel.REPLICATED,
        role="experts",
        num_experts=2,
        tensors={"gate": fact("gate", "Q4_0", (2, 4, 64)), "up": fact("up", "Q4_0", (2, 4, 64))},
    )
    scheme = Gguf.scheme(info, None)
    specs = scheme.parameters(info)
    assert [(spec.name, spec.shape, spec.output_dim, spec.input_dim) for spec in specs] == [
        ("weight_gate", (2, 4, 36), 1, 2),
        ("weight_up", (2, 4, 36), 1, 2),
    ]
    gate, up = (random_blocks("Q4_0", 8, 2 + extra)[:, :36].reshape(2, 4, 36).copy() for extra in (0, 1))
    layer = Holder(info, {"weight_gate": torch.from_numpy(gate), "weight_up": torch.from_numpy(up)})
    scheme.finalize(layer)
    kind = gguf.GGMLQuantizationType.Q4_0
    want = np.concatenate([gguf_dequantize(gate, kind), gguf_dequantize(up, kind)], axis=1)
    np.testing.assert_array_equal(layer.parameters["weight"].numpy(), want)


@pytest.mark.parametrize("dtype", ["ggml:Q8_1", "ggml:I32", "bfloat16"])
def test_types_that_cannot_be_read_are_named(dtype: str) -> None:
    info = fused(tensors={**fused().tensors, "k": {"weight": TensorFacts("k", dtype, (4, 64))}})
    with pytest.raises(CheckpointError) as caught:
        Gguf.scheme(info, None).parameters(info)
    assert caught.value.message == (f"layer layers.0.attn.qkv (k) is stored as {dtype}, which cannot be dequantized")


def test_a_shard_that_the_file_lacks_is_named() -> None:
    info = fused(tensors={}, sources={"q": "blk.0.attn_q"})
    with pytest.raises(CheckpointError) as caught:
        Gguf.scheme(info, None).parameters(info)
    assert caught.value.message == "the checkpoint has no weight for layer layers.0.attn.qkv (q)"
    assert caught.value.value == "blk.0.attn_q"


def test_a_cut_through_a_block_is_an_error() -> None:
    info = fused(
        parallel=Parallel.ROW,
        rank=RankInfo(0, 4),
        shards=(OutputShard("", 8),),
        tensors={"": fact("o", "Q4_0", (8, 64))},
    )
    with pytest.raises(CheckpointError) as caught:
        Gguf.scheme(info, None).parameters(info)
    assert caught.value.message == (
        "layer layers.0.attn.qkv has 16 input columns on this rank, no multiple of the 32 of a Q4_0 block"
    )


def test_the_request_is_checked_before_loading() -> None:
    words = frozenset({"ggml:Q4_1", "ggml:F32", "ggml:Q8_1", "ggml:Q1_0", "ggml:I32"})
    (reason,) = Gguf.check(QuantizationRequest(kind="gguf", storage_dtypes=words))
    assert (reason.code, reason.fact, reason.detail) == (
        "storage_dtype",
        "storage_dtypes",
        "Q1_0, Q8_1 cannot be dequantized",
    )
    (reason,) = Gguf.check(QuantizationRequest(kind="gguf", online="fp8"))
    assert (reason.code, reason.detail) == ("online", "gguf does not convert weights to 'fp8'")
    assert not Gguf.check(QuantizationRequest(kind="gguf"))
    preference = Gguf.preference(QuantizationRequest(kind="gguf"))
    assert (preference.band, preference.why) == (Band.FALLBACK, "weights are dequantized at load")
