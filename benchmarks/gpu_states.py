"""Times decoding over latents and with states, and prompts of Mamba-2, on a CUDA device, beside the torch references.

``python benchmarks/gpu_states.py``: one JSON object per case. Bytes are what must be read and written once: latents of
all tokens, or each sequence's state twice; of prompts, all that the kernels hand on too. Launches are recorded into a
graph.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from jackfield.interfaces import AttentionEnv, AttentionRequest, DeviceFacts, OutputShard, StepLimits
from jackfield.interfaces.plugin import Settings
from jackfield.testing.state_cases import Piece, make_step
from jackfield_attention import triton_ssd
from jackfield_attention.state_scans import decayed_step, delta_step, selective_step
from jackfield_attention.torch_mamba import TorchMambaBackend
from jackfield_attention.triton_mla import TritonMlaBackend
from jackfield_attention.triton_mla_layer import TritonMlaLayer
from jackfield_attention.triton_mla_metadata import MlaMetadata
from jackfield_attention.triton_state_chunks import chunk_rows
from jackfield_attention.triton_states import TritonStatesBackend
from jackfield_attention.triton_states_layer import TritonStateMetadata, selective, stepped

BLOCK = 64
REPLAYS = 9
LATENTS = [
    *((16, 1, 4096), (16, 16, 4096), (16, 64, 1024), (16, 128, 1024), (16, 256, 576), (16, 256, 1024)),
    *((32, 256, 1024), (64, 256, 1024), (128, 1, 4096), (128, 16, 4096), (128, 64, 4096), (128, 256, 1024)),
]
"""Heads, sequences, tokens of each."""
NARROW = [(16, 256, 1024), (128, 256, 1024)]
"""The same with latents in 8-bit floats."""
STATES = {"mamba2": (80, 128, 64), "gdn": (32, 128, 128), "mamba1": (8192, 16, 1)}
"""Heads, keys, values; channels and states for ``mamba1``."""
BATCHES = (1, 16, 64, 256)
WALKS = [(8, 3), (8, 2), (4, 2), (4, 1)]
"""Warps and stages."""
PROMPTS = [(80, 1, 128, 64, 8, 2048), (80, 1, 128, 64, 1, 2048), (80, 1, 128, 64, 1, 16384), (128, 8, 128, 64, 8, 2048)]
"""Heads, groups, keys, values, sequences, tokens of each; the first are those of Mamba-2 2.7B."""


def seconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Return median seconds."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def latents(heads: int, sequences: int, tokens: int, stored: str = "bfloat16") -> dict[str, Any]:
    """Return what decode over latents of 512 + 64 takes."""
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    request = AttentionRequest(
        kind="mla",
        dtype="bfloat16",
        device=DeviceFacts("cuda", capability=(9, 0), cores=cores),
        num_heads=heads,
        num_kv_heads=1,
        head_size=192,
        value_head_size=128,
        scale=192**-0.5,
        extra={"latent_size": 512, "rope_size": 64},
        cache_dtype=stored,
    )
    device, pages = torch.device("cuda"), -(-tokens // BLOCK)
    values = {name: option.default for name, option in TritonMlaBackend.options.items()}
    env = AttentionEnv(request, TritonMlaBackend.cache_specs(request)[0], BLOCK, device, Settings(values))
    builder, layer = TritonMlaBackend.metadata_builder(env), TritonMlaLayer(env)
    builder.allocate(StepLimits(sequences, sequences, pages, tokens))
    recorded: Any = builder.capture(sequences, 1)
    table = torch.randperm(sequences * pages, device=device).int().view(sequences, pages)
    lengths = torch.full((sequences,), tokens, dtype=torch.int32, device=device)
    metadata = MlaMetadata(sequences, recorded.splits, lengths, table, [], recorded.parts)
    cache = torch.randn(sequences * pages, BLOCK, 576, device=device, dtype=torch.bfloat16)
    cache = cache.to(getattr(torch, stored))
    q = torch.randn(sequences, heads, 576, device=device, dtype=torch.bfloat16)
    took = seconds(lambda: layer.decode(q[..., :512], q[..., 512:], cache, metadata))
    moved = sequences * tokens * 576 * cache.element_size()
    return {
        "case": "latents",
        "stored": stored,
        "heads": heads,
        "sequences": sequences,
        "tokens": tokens,
        "splits": recorded.splits,
        "us": took * 1e6,
        "tb_s": moved / took / 1e12,
        "tflop_s": 2 * sequences * tokens * heads * (576 + 512) / took / 1e12,
    }


def states(kind: str, sequences: int) -> dict[str, Any]:
    """Return what one token of each sequence takes."""
    heads, keys, values = STATES[kind]
    device = torch.device("cuda")

    def rows(*shape: int) -> torch.Tensor:
        return torch.rand(sequences, *shape, device=device)

    shape = (heads, keys) if kind == "mamba1" else (heads, keys, values)
    plane = torch.rand(sequences + 1, *shape, device=device)
    pages = torch.arange(1, sequences + 1, device=device).unsqueeze(1).expand(-1, 2).contiguous()
    before = pages[:, 0]
    metadata = TritonStateMetadata(sequences, list(range(sequences + 1)), before, pages[:, 1], before < 0, pages)
    state = plane[1:]
    if kind == "mamba1":
        a, out = -torch.rand(heads, keys, device=device), rows(heads)
        inputs = (rows(heads), rows(heads), rows(keys), rows(keys))
        took = seconds(lambda: selective((a, *inputs, inputs[0]), plane, metadata, out))
        plain = seconds(lambda: selective_step(a, *inputs, state))
    else:
        inputs = (rows(heads, keys), rows(heads, keys), rows(heads, values), -rows(heads))
        inputs = (*inputs[:3], inputs[3].unsqueeze(-1), rows(heads)) if kind == "gdn" else inputs
        out = rows(heads, values)
        took = seconds(lambda: stepped(inputs, plane, metadata, out, None))
        step = delta_step if kind == "gdn" else decayed_step
        plain = seconds(lambda: step(*inputs, state))
    moved = 2 * state.numel() * 4
    return {
        "case": kind,
        "sequences": sequences,
        "us": took * 1e6,
        "torch_us": plain * 1e6,
        "tb_s": moved / took / 1e12,
    }


def prompts(heads: int, groups: int, keys: int, values: int, sequences: int, tokens: int) -> dict[str, Any]:
    """Return what prompts of Mamba-2 take in bfloat16: convolution and states."""
    device, kind, total = torch.device("cuda"), torch.bfloat16, sequences * tokens
    channels = heads * values + 2 * groups * keys
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    request = AttentionRequest(
        kind="mamba2",
        dtype="bfloat16",
        device=DeviceFacts("cuda", capability=(9, 0), cores=cores),
        num_heads=heads,
        num_kv_heads=groups,
        head_size=keys,
        value_head_size=values,
        extra={"conv_shards": (OutputShard("", channels),), "conv_width": 4},
    )
    step = make_step([Piece(i, 0, tokens) for i in range(sequences)], [(-1, i) for i in range(sequences)], device)
    rows = torch.randn(total, channels, device=device, dtype=kind)
    x, b, c = rows.split([heads * values, groups * keys, groups * keys], 1)
    b, c = (part.unflatten(1, (groups, keys)) for part in (b, c))
    given = {
        "x": x.unflatten(1, (heads, values)),
        "b": b,
        "c": c,
        "dt": torch.randn(total, heads, device=device).to(kind),
    }
    given |= {name: -torch.rand(heads, device=device) for name in ("a", "d", "dt_bias")}
    weight, out, mixed = torch.randn(channels, 4, device=device).to(kind), torch.empty_like(rows), torch.empty_like(x)
    took: dict[str, float] = {}
    for backend, repeats in ((TritonStatesBackend, 10), (TorchMambaBackend, 1)):
        spec = backend.cache_specs(request)[0]
        env = AttentionEnv(request, spec, BLOCK, device, Settings())
        layer, metadata = backend.layer(env, 0), backend.metadata_builder(env).build(step)
        planes = {one.name: torch.zeros(sequences, *one.page_shape(BLOCK), device=device) for one in spec.planes}
        planes["conv"] = planes["conv"].to(kind)
        work = partial(layer.mix, given, planes, metadata, mixed.view(total, heads, values))
        took[backend.name] = seconds(work, repeats)
        if backend is TritonStatesBackend:
            took |= {f"walks, {warps} warps": walked(work, warps, stages) for warps, stages in WALKS}
        work = partial(layer.convolve, rows, weight, None, planes, metadata, out)
        took[f"{backend.name} conv"] = seconds(work, repeats)
    return {"case": "prompts of mamba2", "heads": heads, "sequences": sequences, "tokens": tokens} | _rates(
        took, chunk_rows(env), total, (heads, groups, keys, values)
    )


def walked(work: Callable[[], Any], warps: int, stages: int) -> float:
    """Return seconds where walks write outputs."""
    triton_ssd.WALKS_PER_CORE, triton_ssd.WALK_WARPS, triton_ssd.WALK_STAGES = 0, warps, stages
    try:
        return seconds(work)
    finally:
        triton_ssd.WALKS_PER_CORE = None


def _rates(took: dict[str, float], rows: int, tokens: int, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """Return times and rates. Products are those of whole chunks; x and b are read twice, states between chunks are
    written and read.
    """
    heads, groups, keys, values = sizes
    flops = 2 * tokens * (heads * (rows * values + 2 * keys * values) + groups * rows * keys)
    between = tokens / rows * heads * keys * values
    moved = 2 * (tokens * (3 * heads * values + 3 * groups * keys) + 2 * between)
    ours, convolved = took["triton_states"], took["triton_states conv"]
    return {
        "seconds": ours,
        "walks": {name: time for name, time in took.items() if name.startswith("walks")},
        "tflop_s": flops / ours / 1e12,
        "tb_s": moved / ours / 1e12,
        "torch_seconds": took["torch_mamba"],
        "conv_seconds": convolved,
        "conv_tb_s": 4 * tokens * (heads * values + 2 * groups * keys) / convolved / 1e12,
        "torch_conv_seconds": took["torch_mamba conv"],
    }


def main() -> None:
    for shape in PROMPTS:
        print(json.dumps(prompts(*shape)), flush=True)
    for heads, sequences, tokens in LATENTS:
        print(json.dumps(latents(heads, sequences, tokens)), flush=True)
    for kind in STATES:
        for sequences in BATCHES:
            print(json.dumps(states(kind, sequences)), flush=True)


if __name__ == "__main__":
    main()
