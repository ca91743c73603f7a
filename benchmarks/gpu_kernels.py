"""Times the Triton kernels on a CUDA device next to the ceilings of the same run: one JSON object per line.

``python benchmarks/gpu_kernels.py [--only TEXT] [--sweep]``. Work is recorded into a graph that goes through several
input sets, so that neither launches nor the second-level cache are measured; times are medians of replays. Bytes count
each input and output once; floating-point operations of prefill count the causal half.

Legend: T tokens, E width, B sequences, L tokens of a sequence, H query heads, K cache heads, D head size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from jackfield.interfaces import (
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    AttentionStep,
    DeviceFacts,
    OpRequest,
    StepLimits,
)
from jackfield.interfaces.plugin import Settings
from jackfield_attention.flash_attn import FlashAttnBackend
from jackfield_attention.triton_backend import TritonBackend
from jackfield_ops.triton_ops import TritonOps

Work = Callable[[], object]
DEVICE = torch.device("cuda", 0)
CACHED_BYTES = 256 << 20
"""Input sets together are at least this large."""
HEADS, KV_HEADS, SIZE = 32, 8, 128


@dataclass
class Bench:
    """Rows so far, and the ceilings: bytes and operations per second."""

    only: str
    bandwidth: float = math.inf
    rate: float = math.inf
    failed: list[str] = field(default_factory=list)

    def report(self, name: str, work: Sequence[Work], *, moved: float = 0.0, done: float = 0.0) -> float:
        """Time ``work`` and print its row; returns seconds of one item."""
        if self.only not in name:
            return math.nan
        try:
            seconds = measure(work)
        except Exception as error:
            self.failed.append(name)
            print(json.dumps({"kernel": name, "error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
            return math.nan
        row: dict[str, Any] = {"kernel": name, "us": round(seconds * 1e6, 2)}
        if moved:
            row |= {"GB/s": round(moved / seconds / 1e9, 1), "of_copy": round(moved / seconds / self.bandwidth, 3)}
        if done:
            row |= {"TFLOP/s": round(done / seconds / 1e12, 1), "of_gemm": round(done / seconds / self.rate, 3)}
        print(json.dumps(row), flush=True)
        return seconds


def measure(work: Sequence[Work], replays: int = 15) -> float:
    """Return median seconds of one item of ``work``."""
    for item in work:
        item()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for item in work:
            item()
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return float(np.median(times)) / len(work)


def sets_for(size: float) -> range:
    """Return a range over as many input sets as it takes to exceed the cache."""
    return range(max(2, min(64, math.ceil(CACHED_BYTES / size))))


def rand(*shape: int) -> torch.Tensor:
    """Return bfloat16 normal numbers on the device."""
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def ceilings(bench: Bench) -> None:
    """Measure copy bandwidth and the rate of a large matrix product."""
    only, bench.only = bench.only, ""
    source = torch.randn(1 << 29, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    moved = 2.0 * source.nbytes
    bench.bandwidth = moved / bench.report("ceiling: copy", [partial(target.copy_, source)], moved=moved)
    del source, target
    a, b = rand(8192, 8192), rand(8192, 8192)
    done = 2.0 * 8192**3
    bench.rate = done / bench.report("ceiling: bf16 product 8192", [partial(torch.mm, a, b)], done=done)
    bench.only = only


def op(name: str) -> Callable[..., Any]:
    """Return a Triton op."""
    return TritonOps.build(name, OpRequest(kind=name), Settings())


def norms(bench: Bench) -> None:
    """Norms of 8B and 0.6B widths."""
    add_norm, norm = op("fused_add_rms_norm"), op("rms_norm")
    for tokens, width in ((1, 4096), (64, 4096), (256, 4096), (8192, 4096), (256, 1024)):
        moved = 2.0 * tokens * width
        weight = rand(width)
        inputs = [(rand(tokens, width), rand(tokens, width)) for _ in sets_for(2 * moved)]
        label = f"T={tokens} E={width}"
        bench.report(f"rms_norm {label}", [partial(norm, x, weight, 1e-6) for x, _ in inputs], moved=2 * moved)
        work = [partial(add_norm, x, y, weight, 1e-6) for x, y in inputs]
        bench.report(f"fused_add_rms_norm {label}", work, moved=4 * moved)


def activations(bench: Bench) -> None:
    """Gated activations of 8B."""
    for name, tokens in itertools.product(("silu_and_mul", "gelu_tanh_and_mul"), (1, 64, 256, 8192)):
        width, apply = 12288, op(name)
        moved = 6.0 * tokens * width
        inputs = [rand(tokens, 2 * width) for _ in sets_for(moved)]
        bench.report(f"{name} T={tokens} F={width}", [partial(apply, x) for x in inputs], moved=moved)


@dataclass
class Paged:
    """A batch over pages, and what its kernels need."""

    layer: Any
    metadata: Any
    step: AttentionStep
    qkv: torch.Tensor
    caches: list[dict[str, torch.Tensor]]

    @property
    def q(self) -> torch.Tensor:
        """Queries [T, H, D]."""
        return self.qkv[:, : HEADS * SIZE].view(-1, HEADS, SIZE)

    def attending(self) -> list[Work]:
        """Return attention over each of the caches."""
        out = torch.empty((len(self.qkv), HEADS, SIZE), dtype=self.qkv.dtype, device=DEVICE)
        return [partial(self.layer.attend, self.q, cache, self.metadata, out) for cache in self.caches]


def paged(
    backend: type[AttentionBackend], sequences: int, count: int, length: int, block: int = 64, **options: int
) -> Paged:
    """Return a batch of equal sequences on shuffled pages."""
    seen = torch.cuda.get_device_properties(DEVICE)
    facts = DeviceFacts("cuda", capability=(seen.major, seen.minor), cores=seen.multi_processor_count)
    request = AttentionRequest(
        kind="full",
        dtype="bfloat16",
        device=facts,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        scale=SIZE**-0.5,
    )
    env = AttentionEnv(request, backend.cache_specs(request)[0], block, DEVICE, Settings(options))
    step = equal_step(sequences, count, length, block)
    pages = step.block_table.numel() + 1
    shape = (pages, KV_HEADS, block, SIZE)
    caches = [{"k": rand(*shape), "v": rand(*shape)} for _ in sets_for(4.0 * math.prod(shape))]
    builder = backend.metadata_builder(env)
    # The largest sequence an engine would allow: what bounds the splits.
    builder.allocate(StepLimits(step.num_tokens, sequences, step.block_table.shape[1], max(length, 32768)))
    qkv = rand(step.num_tokens, (HEADS + 2 * KV_HEADS) * SIZE)
    return Paged(backend.layer(env, 0), builder.build(step), step, qkv, caches)


def equal_step(sequences: int, count: int, length: int, block: int) -> AttentionStep:
    """Return a step of ``sequences`` with ``count`` new tokens of ``length``."""
    blocks = -(-length // block)
    table = (torch.randperm(sequences * blocks) + 1).int().view(sequences, blocks)
    starts = np.arange(sequences + 1, dtype=np.int32) * count
    positions = torch.arange(length - count, length).repeat(sequences)
    owners = torch.arange(sequences).repeat_interleave(count)
    slots = table[owners, positions // block].long() * block + positions % block
    return AttentionStep(
        num_tokens=sequences * count,
        num_sequences=sequences,
        num_decodes=sequences if count == 1 else 0,
        max_query=count,
        max_length=length,
        query_start=torch.from_numpy(starts).to(DEVICE),
        lengths=torch.full((sequences,), length, dtype=torch.int32, device=DEVICE),
        block_table=table.to(DEVICE),
        slots=slots.to(DEVICE),
        positions=positions.to(DEVICE),
        query_start_host=starts,
        lengths_host=np.full(sequences, length, dtype=np.int32),
    )


def moves(bench: Bench) -> None:
    """Rotation, cache write, and all in one with norms."""
    rotate, weight = op("rotary"), rand(SIZE)
    for tokens in (1, 64, 256, 8192):
        batch = paged(TritonBackend, tokens if tokens <= 256 else 4, 1 if tokens <= 256 else 2048, 2048)
        cos_sin = torch.randn(tokens, SIZE, device=DEVICE)
        angles, slots, width = 4.0 * cos_sin.numel(), batch.step.slots, batch.qkv.shape[1]
        projections = [rand(tokens, width) for _ in sets_for(2.0 * tokens * width)]
        pairs = list(zip(projections, itertools.cycle(batch.caches), strict=False))
        turned = (HEADS + KV_HEADS) * SIZE
        views = [x[:, :turned].view(-1, HEADS + KV_HEADS, SIZE) for x in projections]
        work: list[Work] = [partial(rotate, x, cos_sin) for x in views]
        bench.report(f"rotary T={tokens}", work, moved=4.0 * tokens * turned + angles)
        work = [partial(batch.layer.prepare, x, cos_sin, weight, weight, 1e-6, c, slots) for x, c in pairs]
        bench.report(f"qk_norm_rope_write T={tokens}", work, moved=4.0 * tokens * width + angles)


def decodes(bench: Bench, sweep: bool) -> None:
    """Decode attention; bytes are those of keys and values."""
    for sequences, length in ((1, 4096), (64, 1024), (256, 1024)):
        moved = 4.0 * sequences * length * KV_HEADS * SIZE
        name = f"decode B={sequences} L={length}"
        for block in (64, 16):
            bench.report(
                f"{name} block={block}", paged(TritonBackend, sequences, 1, length, block).attending(), moved=moved
            )
        for options in decode_options() if sweep and bench.only in name else ():
            work = paged(TritonBackend, sequences, 1, length, 64, **options).attending()
            bench.report(f"{name} {options}", work, moved=moved)


def decode_options() -> Iterator[dict[str, int]]:
    """Yield settings to try."""
    for tile, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (3, 5)):
        yield {"decode_tile": tile, "decode_warps": warps, "decode_stages": stages}
    for splits in (1, 2, 4, 8, 16, 32, 64):
        yield {"decode_splits": splits}


def prefills(bench: Bench, sweep: bool) -> None:
    """Fresh prefill, causal."""
    for sequences, length in ((8, 2048), (2, 8192)):
        done = 4.0 * HEADS * SIZE * sequences * length * length / 2
        for backend, block in ((TritonBackend, 64), (TritonBackend, 16), (FlashAttnBackend, 64)):
            name = f"prefill {backend.name} B={sequences} L={length} block={block}"
            bench.report(name, paged(backend, sequences, length, length, block).attending(), done=done)
        for options in prefill_options() if sweep and bench.only in "prefill triton" else ():
            work = paged(TritonBackend, sequences, length, length, 64, **options).attending()
            bench.report(f"prefill triton B={sequences} L={length} {options}", work, done=done)


def prefill_options() -> Iterator[dict[str, int]]:
    """Yield settings to try."""
    for rows, tile, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 5)):
        yield {"prefill_rows": rows, "prefill_tile": tile, "prefill_warps": warps, "prefill_stages": stages}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only kernels whose name contains this text")
    parser.add_argument("--sweep", action="store_true", help="try other shapes of the attention kernels too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(arguments.only)
    print(json.dumps({"device": torch.cuda.get_device_name(DEVICE), "torch": torch.__version__}), flush=True)
    ceilings(bench)
    norms(bench)
    activations(bench)
    moves(bench)
    decodes(bench, arguments.sweep)
    prefills(bench, arguments.sweep)
    if bench.failed:
        raise SystemExit(f"failed: {', '.join(bench.failed)}")


if __name__ == "__main__":
    main()
