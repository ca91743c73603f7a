"""Kernels in C on a CPU, beside torch and the memory's own speed.

    python benchmarks/cpu_kernels.py --threads 2 --types Q4_1 Q8_0 F32 --rows 1 16 32

Products: one pass over the weights of a model (by default the shapes of SmolLM2-135M), so that no weight stays in a
near cache; bytes are those of the stored weights. Ops and attention: one call. Every figure is the minimum of many
short repetitions, since the machine may be shared. Prints one JSON line for each measurement.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch

from jackfield.interfaces import AttentionEnv, AttentionRequest
from jackfield.layers.functional import REFERENCES
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_attention.native_cpu_layer import NativeLayer, NativeMetadata
from jackfield_native.products import PACKED, Weight, integer_rows
from jackfield_ops.native_calls import CALLS

PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SHAPES = {
    "smollm2-135m": (30, [(960, 576), (576, 576), (3072, 576), (576, 1536)], (49152, 576)),
    "llama-1b": (16, [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)], (128256, 2048)),
}
"""Layers, their matrices (outputs, inputs), and the head."""


def best(call: Callable[[], Any], seconds: float) -> float:
    """Return the least seconds of a call, repeated for ``seconds`` and at least three times."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return min(times)


def say(**row: Any) -> None:
    print(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def ceilings(seconds: float) -> None:
    """Read and copy 256 MiB."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    say(what="read", gb_per_s=source.nbytes / best(source.sum, seconds) / 1e9)
    say(what="copy", gb_per_s=2 * source.nbytes / best(lambda: target.copy_(source), seconds) / 1e9)


def random_weight(word: str, outputs: int, inputs: int) -> torch.Tensor:
    """Return a weight; the bits of packed types are small, so that scales are finite."""
    if word in PLAIN:
        return torch.randn(outputs, inputs).to(PLAIN[word])
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[word]]
    packed = np.random.default_rng(0).integers(0, 60, (outputs, inputs // values * nbytes), dtype=np.uint8)
    return torch.from_numpy(packed)


def model(shapes: str, word: str) -> list[tuple[int, int, torch.Tensor]]:
    layers, matrices, head = SHAPES[shapes]
    return [(o, i, random_weight(word, o, i)) for o, i in [*matrices * layers, head]]


def products(shapes: str, word: str, rows: list[int], seconds: float) -> None:
    """One pass by the kernels, by decoding and torch, and for dense weights by torch alone."""
    tensors = model(shapes, word)
    weights = [Weight([(tensor, word)], inputs) for _, inputs, tensor in tensors]
    total, numbers = sum(t.nbytes for *_, t in tensors), sum(o * i for o, i, _ in tensors)
    for count in rows:
        inputs = {i: torch.randn(count, i) for _, i, _ in tensors}
        outs = {o: torch.empty(count, o) for o, _, _ in tensors}

        def passes(
            call: Callable[[Weight, torch.Tensor, torch.Tensor], Any], inputs: Any = inputs, outs: Any = outs
        ) -> None:
            for weight in weights:
                call(weight, inputs[weight.inputs], outs[weight.outputs])

        ways: dict[str, Callable[..., Any]] = {"few rows": lambda w, x, out: w.few_rows(x, None, out)}
        if word in PACKED and count <= integer_rows():
            same = {id(w): Weight(w.parts, w.inputs, integers=True) for w in weights}
            ways["integers"] = lambda w, x, out, same=same: same[id(w)].few_rows(x, None, out)
        if word == "F32":
            ways["torch"] = lambda w, x, out: torch.mm(x, w.parts[0][0].t(), out=out)
        elif count > 8:
            ways["decoded"] = lambda w, x, out: w.many_rows(x, None, out)
        for way, call in ways.items():
            taken = best(lambda call=call: passes(call), seconds)  # type: ignore[misc]
            rates = {"gb_per_s": total / taken / 1e9, "gflop_per_s": 2 * count * numbers / taken / 1e9}
            say(what="products", shapes=shapes, type=word, rows=count, way=way, ms=taken * 1e3, **rates)


def ops(rows: list[int], seconds: float) -> None:
    """Every op at the sizes of SmolLM2-135M, beside its torch reference."""
    for count in rows:
        x, residual, weight = torch.randn(count, 576), torch.randn(count, 576), torch.randn(576)
        cos_sin = torch.randn(count, 64).cos()
        arguments: dict[str, tuple[Any, ...]] = {
            "rms_norm": (x, weight, 1e-5),
            "fused_add_rms_norm": (x, residual, weight, 1e-5),
            "rotary": (torch.zeros(count, 12, 64), cos_sin),
        }
        for op, call in CALLS.items():
            given = arguments.get(op, (torch.randn(count, 3072),))
            taken = best(lambda call=call, given=given: call(*given), seconds / 4)  # type: ignore[misc]
            reference = best(lambda op=op, given=given: REFERENCES[op](*given), seconds / 4)  # type: ignore[misc]
            say(what="op", op=op, rows=count, us=taken * 1e6, torch_us=reference * 1e6)


def attention(lengths: list[int], batches: list[int], seconds: float) -> None:
    """Decode attention of one layer of SmolLM2-135M; bytes are those of the keys and values seen."""
    request = AttentionRequest(
        kind="full", num_heads=9, num_kv_heads=3, head_size=64, value_head_size=64, scale=0.125, dtype="float32"
    )
    (spec,) = NativeCpuBackend.cache_specs(request)
    layer = NativeLayer(AttentionEnv(request, spec, 32, torch.device("cpu")))
    for batch in batches:
        for length in lengths:
            blocks = -(-length // 32)
            cache = {name: torch.randn(batch * blocks, 3, 32, 64) for name in ("k", "v")}
            table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
            places = np.arange(batch)
            rows = np.stack((places, places, 0 * places, 0 * places + length)).astype(np.int32)
            q, out = torch.randn(batch, 9, 64), torch.empty(batch, 9, 64)
            step = NativeMetadata(rows, table, [])
            taken = best(lambda q=q, c=cache, s=step, o=out: layer.attend(q, c, s, o), seconds / 4)  # type: ignore[misc]
            seen = batch * length * 3 * 64 * 8
            say(what="attention", sequences=batch, length=length, us=taken * 1e6, gb_per_s=seen / taken / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", default="smollm2-135m", choices=sorted(SHAPES))
    parser.add_argument("--types", nargs="+", default=["F32", "BF16", "Q8_0", "Q4_0", "Q4_1"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 48])
    parser.add_argument("--what", nargs="+", default=["products", "ops", "attention"])
    parser.add_argument("--seconds", type=float, default=0.5, help="that each figure is repeated for")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    say(
        what="machine",
        threads=args.threads,
        torch=torch.__version__,
        capability=torch.backends.cpu.get_cpu_capability(),
    )
    ceilings(args.seconds)
    if "products" in args.what:
        for word in args.types:
            products(args.shapes, word, args.rows, args.seconds)
    if "ops" in args.what:
        ops([1, 16, 512], args.seconds)
    if "attention" in args.what:
        attention([128, 1024, 8192], [1, 16], args.seconds)


if __name__ == "__main__":
    main()
