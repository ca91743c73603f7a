"""Times products of many rows on capability 9.0 beside torch's and the grouped ones of ``triton``.

``python benchmarks/gpu_rows.py [--rows 2048 8192] [--swizzle 8 16 32]``: one JSON object per product, with the median
of replays of a graph in microseconds, TFLOP/s and the relative error against torch's. A gated product is held against
torch's product and the activation kernel of ``triton``; a block of experts against the backend ``triton``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from gpu_dense import DEVICE
from gpu_fp8 import microseconds
from gpu_moe import BLOCKS, matrices
from jackfield.interfaces import DeviceFacts, MoEConfig, OpRequest
from jackfield.interfaces.moe import experts_request
from jackfield.interfaces.plugin import Settings
from jackfield_moe import gluon_experts
from jackfield_moe.gluon_experts import GluonExperts
from jackfield_moe.triton_experts import TritonExperts
from jackfield_ops.triton_ops import TritonOps
from jackfield_triton import rows_product as product

MATRICES = {
    "0.6b gate-up": (6144, 1024, True),
    "8b gate-up": (24576, 4096, True),
    "8b qkv": (6144, 4096, False),
    "8b o": (4096, 4096, False),
    "8b down": (4096, 12288, False),
    "0.6b down": (1024, 3072, False),
}
"""Outputs, inputs, and whether half of the outputs are gates."""
EXPERTS = {
    "qwen3-30b-a3b": BLOCKS["qwen3-30b-a3b"],
    "deepseek-v2-lite": MoEConfig(num_experts=64, top_k=6, hidden_size=2048, intermediate_size=1408),
}


def show(name: str, rows: int, work: float, runs: Mapping[str, Callable[[], torch.Tensor]], **facts: Any) -> None:
    """Print a line for each way; the first one is what the others are compared with."""
    wanted = next(iter(runs.values()))().float()
    for way, run in runs.items():
        found = run().float()
        us = microseconds(run)
        line = {"product": name, "rows": rows, "way": way, "us": round(us, 1), "tflops": round(work / us / 1e6, 1)}
        print(json.dumps({**line, "error": float((found - wanted).norm() / wanted.norm()), **facts}), flush=True)


def dense(name: str, rows: int, cores: int, **facts: Any) -> None:
    """Time a product with one matrix."""
    outputs, inputs, gated = MATRICES[name]
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE) * inputs**-0.5
    facts_of_device = DeviceFacts("cuda", capability=torch.cuda.get_device_capability())
    gate = TritonOps.build("silu_and_mul", OpRequest(kind="silu_and_mul", device=facts_of_device), Settings())
    out = x.new_empty(rows, outputs // 2 if gated else outputs)
    word = "silu" if gated else ""
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "torch": (lambda: gate(x @ weight.T)) if gated else (lambda: x @ weight.T),
        "gluon": lambda: product.rows_product(x, weight[None], out, cores, activation=word),
    }
    show(name, rows, 2.0 * rows * outputs * inputs, runs, **facts)


def experts(name: str, rows: int, **facts: Any) -> None:
    """Time a block of experts; rows go to random ones."""
    config = EXPERTS[name]
    request = experts_request(config, "dense", dtype="bfloat16")
    up, down = matrices(config, "dense")
    x = torch.randn(rows, config.hidden_size, dtype=torch.bfloat16, device=DEVICE)
    chosen = torch.rand(rows, config.num_experts, device=DEVICE).topk(config.top_k).indices
    weights = torch.rand(rows, config.top_k, device=DEVICE)
    ways = {"triton": TritonExperts.build(request), "gluon": GluonExperts.build(request)}
    runs = {way: partial(backend.apply, x, up, down, weights, chosen) for way, backend in ways.items()}
    work = 6.0 * rows * config.top_k * config.hidden_size * config.intermediate_size
    show(name, rows, work, runs, **facts)


def main() -> None:
    """Time everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--swizzle", type=int, nargs="+", default=[product.SWIZZLE])
    arguments = parser.parse_args()
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    gluon_experts.MANY_PAIRS = 1  # every number of rows is timed, also those that it would leave to triton
    for product.SWIZZLE in arguments.swizzle:
        for rows in arguments.rows:
            for name in MATRICES:
                dense(name, rows, cores, swizzle=product.SWIZZLE)
            for name in EXPERTS:
                experts(name, rows, swizzle=product.SWIZZLE)


if __name__ == "__main__":
    main()
