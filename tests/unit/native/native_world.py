"""Random weights in every storage type, layers that hold them, and buffers with guards around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from jackfield.interfaces import LayerInfo, OutputShard, Parallel, TensorFacts

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where the blocks of packed types hold float16 scales."""
PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
GUARD = 64
CANARY = -777.0


class Holder:
    """The least a layer can be."""

    def __init__(self, info: LayerInfo, parameters: Mapping[str, torch.Tensor]) -> None:
        self.info = info
        self.parameters = dict(parameters)

    def get_parameter(self, target: str) -> torch.Tensor:
        return self.parameters[target]

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = dict(parameters)


def block_values(word: str) -> int:
    """Return how many numbers cannot be divided."""
    return 1 if word in PLAIN else int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[word]][0])


def stored(word: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return random rows in a storage type: bytes for packed ones, all values of which occur, with finite scales."""
    generator = np.random.default_rng([seed, rows, columns])
    if word in PLAIN:
        return torch.from_numpy(generator.normal(size=(rows, columns))).to(PLAIN[word])
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[word]]
    blocks = generator.integers(0, 256, (rows, columns // values, nbytes), dtype=np.uint8)
    for offset in HALVES[word]:
        scales = generator.normal(size=(rows, columns // values, 1)).astype("<f2") / np.float16(64)
        blocks[:, :, offset : offset + 2] = scales.astype("<f2").view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, -1))


def values_of(weight: torch.Tensor, word: str) -> torch.Tensor:
    """Return the numbers in float32, from the gguf package's own decoders."""
    if word in PLAIN:
        return weight.float()
    return torch.from_numpy(dequantize(weight.numpy(), gguf.GGMLQuantizationType[word])).float()


def bound(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What products may be off by, with S the sum of the terms' magnitudes: in float32 each of I roundings by 2^-24 of
    S, of which four times the square root is allowed; in bfloat16 a rounding of the weight and one of the result.
    """
    unit = 4 * x.shape[1] ** 0.5 * 2**-24 if x.dtype == torch.float32 else 2**-8
    return unit * (x.double().abs() @ values.double().abs().t()) + 1e-6


def rounding_bound(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return :func:`bound` and what rounding rows to 16 bits adds: half of a 32767th of the largest of 32 numbers for
    each of them.
    """
    largest = x.double().view(len(x), -1, 32).abs().amax(-1).repeat_interleave(32, 1)
    return bound(x, values) + largest / 65534 @ values.double().abs().t()


def guarded(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a float32 tensor of NaN, and the buffer around it that holds canaries."""
    size = int(np.prod(shape))
    buffer = torch.full((size + 2 * GUARD,), CANARY)
    inside = buffer[GUARD : GUARD + size].view(shape)
    inside.fill_(torch.nan)
    return inside, buffer


def untouched(buffer: torch.Tensor) -> bool:
    """Return whether all canaries are alive."""
    return bool((buffer[:GUARD] == CANARY).all() and (buffer[-GUARD:] == CANARY).all())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def layer_info(sizes: Mapping[str, tuple[int, str]], inputs: int, dtype: str = "float32", **changes: Any) -> LayerInfo:
    """Return a layer of shards ``name: (outputs, storage type of a GGUF file or torch's word)``."""

    def facts(rows: int, word: str) -> TensorFacts:
        packed = word in PLAIN or word in gguf.GGMLQuantizationType.__members__
        return TensorFacts("t", f"ggml:{word}" if packed else word, (rows, inputs))

    values: dict[str, Any] = {
        "name": "layers.0.part",
        "input_size": inputs,
        "shards": tuple(OutputShard(name, rows) for name, (rows, _) in sizes.items()),
        "parallel": Parallel.REPLICATED,
        "dtype": dtype,
        "tensors": {name: {"weight": facts(rows, word)} for name, (rows, word) in sizes.items()},
    }
    return LayerInfo(**(values | changes))
