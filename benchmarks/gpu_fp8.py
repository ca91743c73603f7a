"""Times products of many rows on a CUDA device: bfloat16, and 8-bit floats with what it takes to quantize the rows.

``python benchmarks/gpu_fp8.py``: one JSON object per matrix and number of rows; microseconds and TFLOP/s, medians of
replays of a graph. Legend: T rows of activations, I inputs, O outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gpu_dense import DEVICE, MATRICES, replayed
from jackfield.layers.functional import quantize_rows
from jackfield_quantization.fp8_kernels import quantize_tokens

ROWS = (32, 64, 128, 256, 2048, 8192)
TIMES = 8
"""How often a product is in a graph."""


def microseconds(work: Callable[[], Any]) -> float:
    """Return the median time of ``work``."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMES):
            work()
    graph.replay()
    return round(replayed(graph) / TIMES * 1e6, 2)


def measure(name: str, rows: int, outputs: int, inputs: int) -> dict[str, Any]:
    """Return the times of one matrix."""
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE)
    made = quantize_rows(weight)
    narrow, scale = made.values, made.scales
    activation = quantize_tokens(x)
    one = torch.ones((), device=DEVICE)
    by_row = {"scale_a": activation.scales.unsqueeze(-1), "scale_b": scale.unsqueeze(0)}

    def product(scales: dict[str, torch.Tensor], *, fast: bool = True) -> torch.Tensor:
        values = activation.values
        return torch._scaled_mm(values, narrow.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

    times = {
        "bf16": microseconds(lambda: F.linear(x, weight)),
        "by_row": microseconds(lambda: product(by_row)),
        "by_row_exact": microseconds(lambda: product(by_row, fast=False)),
        "by_tensor": microseconds(lambda: product({"scale_a": one, "scale_b": one})),
        "quantize": microseconds(lambda: quantize_tokens(x)),
    }
    work = 2 * rows * outputs * inputs
    rates = {key: round(work / us / 1e6, 1) for key, us in times.items() if key != "quantize"}
    return {"matrix": name, "O": outputs, "I": inputs, "T": rows, "us": times, "TFLOP/s": rates}


def main() -> None:
    """Measure all matrices but the heads."""
    print(json.dumps({"device": torch.cuda.get_device_name(DEVICE), "torch": torch.__version__}))
    for name, (outputs, inputs) in MATRICES.items():
        if "8b" in name and "head" not in name:
            for rows in ROWS:
                print(json.dumps(measure(name, rows, outputs, inputs)), flush=True)


if __name__ == "__main__":
    main()
