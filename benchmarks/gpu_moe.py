"""Times blocks of experts on a CUDA device, and holds their results against torch's reference.

``python benchmarks/gpu_moe.py [--skewed] [--experts torch,triton]``: one JSON object per block, layout, backend and
number of rows, with the median of replays of a graph in microseconds, TFLOP/s, GB/s of weights that must be read, and
the relative error against float32. Legend: T rows, X experts, S chosen, E width, F inner.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch

from gpu_dense import DEVICE
from gpu_fp8 import microseconds
from jackfield.interfaces import ExpertsBackend, ExpertsRequest, MoEConfig
from jackfield.interfaces.moe import ExpertMatrices, experts_request
from jackfield.layers.functional import quantize_rows
from jackfield.layers.routing import route
from jackfield_moe.torch_experts import TorchExperts
from jackfield_moe.torch_grouped import TorchGrouped
from jackfield_moe.triton_experts import TritonExperts

BLOCKS = {
    "qwen3-30b-a3b": MoEConfig(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768),
    "mixtral-8x7b": MoEConfig(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336),
    "gpt-oss-20b": MoEConfig(
        num_experts=32, top_k=4, hidden_size=2880, intermediate_size=2880, activation="swiglu_oai", bias=True
    ),
}
ROWS = (1, 8, 64, 256, 2048, 8192)
BACKENDS: dict[str, type[ExpertsBackend]] = {
    "torch": TorchExperts,
    "torch_grouped": TorchGrouped,
    "triton": TritonExperts,
}
CHECKED = 64
"""Most rows whose results are compared: the reference is slow."""


def matrices(config: MoEConfig, layout: str) -> tuple[ExpertMatrices, ExpertMatrices]:
    """Return random matrices of a block in ``dense`` or ``fp8``."""
    count, width, inner = config.num_experts, config.hidden_size, config.intermediate_size
    made = []
    for outputs, inputs in ((2 * inner, width), (width, inner)):
        wide = torch.randn(count, outputs, inputs, dtype=torch.bfloat16, device=DEVICE) * inputs**-0.5
        bias = torch.randn(count, outputs, dtype=torch.bfloat16, device=DEVICE) if config.bias else None
        if layout == "dense":
            made.append(ExpertMatrices(layout, wide, bias=bias))
            continue
        narrow = torch.empty(wide.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
        scale = torch.empty(count, outputs, 1, device=DEVICE)
        for expert, matrix in enumerate(wide):
            found = quantize_rows(matrix)
            narrow[expert], scale[expert, :, 0] = found.values, found.scales
        made.append(ExpertMatrices(layout, narrow, scale, bias=bias))
    return made[0], made[1]


def measure(
    request: ExpertsRequest,
    backend: type[ExpertsBackend],
    pair: tuple[ExpertMatrices, ExpertMatrices],
    routed: tuple[torch.Tensor, torch.Tensor],
) -> dict[str, Any]:
    """Return the time and the error of one backend; a backend that waits for the device cannot be in a graph."""
    weights, experts = routed
    rows = len(experts)
    x = torch.randn(rows, request.hidden_size, dtype=torch.bfloat16, device=DEVICE)
    made = backend.build(request)
    found = made.apply(x, *pair, weights, experts)
    row: dict[str, Any] = {}
    if rows <= CHECKED:
        wanted = TorchExperts.build(request).apply(x.float(), *_wide(pair), weights, experts)
        row["error"] = round(float((found.float() - wanted).norm() / wanted.norm()), 5)
    if backend is TorchExperts:
        return row
    row["us"] = microseconds(lambda: made.apply(x, *pair, weights, experts))
    inner, width = request.intermediate_size, request.hidden_size
    row["TFLOP/s"] = round(2 * experts.numel() * 3 * inner * width / row["us"] / 1e6, 1)
    used = len(experts.unique())
    row["GB/s"] = round(used * 3 * inner * width * pair[0].weight.element_size() / row["us"] / 1e3, 1)
    return row


def _wide(pair: tuple[ExpertMatrices, ExpertMatrices]) -> Iterator[ExpertMatrices]:
    for one in pair:
        weight = one.weight.float() if one.layout == "dense" else one.weight
        yield ExpertMatrices(one.layout, weight, one.scale, one.zero, None if one.bias is None else one.bias.float())


def main() -> None:
    """Measure everything that was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--skewed", action="store_true", help="some experts get many times the rows of others")
    parser.add_argument("--experts", default="torch,torch_grouped,triton")
    arguments = parser.parse_args()
    scoring = "simulated_skewed" if arguments.skewed else "simulated_uniform"
    for name, config in BLOCKS.items():
        simulated = MoEConfig(
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            scoring=scoring,
        )
        for layout in ("dense", "fp8"):
            pair, request = matrices(config, layout), experts_request(config, layout, dtype="bfloat16")
            for rows in ROWS:
                routed = route(torch.zeros(rows, config.num_experts, device=DEVICE), simulated)
                for label in arguments.experts.split(","):
                    if layout not in BACKENDS[label].kinds:
                        continue
                    case = {"block": name, "layout": layout, "T": rows, "backend": label, "routing": scoring}
                    found = {**case, **measure(request, BACKENDS[label], pair, routed)}
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
