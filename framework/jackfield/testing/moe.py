"""Conformance of expert kernels: blocks in every published layout against a loop over pairs in float64.

Legend: N rows, S experts per row, X experts, E width, F inner, O outputs, I inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from jackfield.interfaces import ExpertsRequest
from jackfield.interfaces.moe import ExpertMatrices
from jackfield.testing.bench import Bench
from jackfield.testing.common import PluginConformance
from jackfield.testing.samples import BLOCKS, EXPERTS

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The numbers of four bits, sign first (OCP Microscaling 1.0)."""
GROUP = 32
Packed = tuple[ExpertMatrices, torch.Tensor]
"""Matrices as stored, and the numbers [X, O, I] that they mean, in float64."""


def dense(weight_XOI: torch.Tensor, dtype: torch.dtype = torch.float32) -> Packed:
    """Return the layout ``dense``."""
    stored = weight_XOI.to(dtype)
    return ExpertMatrices("dense", stored), stored.double()


def _per_group(weight_XOI: torch.Tensor) -> torch.Tensor:
    return weight_XOI.view(*weight_XOI.shape[:-1], -1, GROUP)


def _fp8(weight_XOI: torch.Tensor) -> Packed:
    scale = weight_XOI.abs().amax(-1, keepdim=True) / 448.0
    stored = (weight_XOI / scale).to(torch.float8_e4m3fn)
    return ExpertMatrices("fp8", stored, scale), stored.double() * scale.double()


def _int8(weight_XOI: torch.Tensor) -> Packed:
    groups = _per_group(weight_XOI)
    scale = groups.abs().amax(-1) / 127.0
    stored = (groups / scale.unsqueeze(-1)).round()
    matrices = ExpertMatrices("int8", stored.flatten(-2).to(torch.int8), scale)
    return matrices, (stored.double() * scale.double().unsqueeze(-1)).flatten(-2)


def _int4(weight_XOI: torch.Tensor) -> Packed:
    groups = _per_group(weight_XOI)
    scale = groups.abs().amax(-1) / 7.0
    stored = (groups / scale.unsqueeze(-1)).round() + 8
    matrices = ExpertMatrices("int4", _halves(stored.flatten(-2)), scale)
    return matrices, ((stored.double() - 8) * scale.double().unsqueeze(-1)).flatten(-2)


def _mxfp4(weight_XOI: torch.Tensor) -> Packed:
    groups = _per_group(weight_XOI)
    exponent = (groups.abs().amax(-1) / 6.0).log2().ceil().clamp(-126, 126)
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - E2M1).abs().argmin(-1)
    matrices = ExpertMatrices("mxfp4", _halves(codes.flatten(-2)), (exponent + 127).to(torch.uint8))
    return matrices, (E2M1[codes].double() * torch.exp2(exponent.double()).unsqueeze(-1)).flatten(-2)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """Return bytes of two numbers, the even column in the low four bits."""
    pairs = numbers.to(torch.uint8).view(*numbers.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


PACKERS: Mapping[str, Callable[[torch.Tensor], Packed]] = {
    "dense": dense,
    "fp8": _fp8,
    "int8": _int8,
    "int4": _int4,
    "mxfp4": _mxfp4,
}


class ExpertsConformance(PluginConformance):
    """Each accepted block and layout, for few rows and many."""

    family: ClassVar[str] = "moe_experts"
    tolerances: ClassVar[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 8e-3}
    """Largest error as a part of the largest result, by computation type."""
    layout_tolerances: ClassVar[Mapping[str, float]] = {}
    """The same by layout, for kernels that quantize activations."""

    def check(self, bench: Bench, request: ExpertsRequest, rows: int, dtype: str = "float32") -> None:
        """Compare one block with the loop, where the plugin accepts it."""
        request = replace(request, dtype=dtype)
        if not bench.accepts(request):
            return
        block, kind = _block(request, rows), getattr(torch, dtype)
        up, down = (_placed(matrices, bench.device, kind) for matrices, _ in block["matrices"])
        plugin: Any = bench.plugin
        found = plugin.build(request).apply(
            block["x"].to(bench.device, kind),
            up,
            down,
            block["weights"].to(bench.device),
            block["experts"].to(bench.device),
        )
        assert found.dtype == kind and found.shape == (rows, request.hidden_size)
        wanted = _loop(request, block, kind)
        if not rows:
            return
        error, size = (found.double().cpu() - wanted).abs().max(), wanted.abs().max()
        bound = self.layout_tolerances.get(request.kind, self.tolerances[dtype])
        assert error <= bound * size, f"off by {float(error):.3g}, the largest result is {float(size):.3g}"

    @pytest.mark.parametrize("rows", [0, 1, 7, 70])
    @pytest.mark.parametrize("name", list(BLOCKS))
    def test_blocks(self, bench: Bench, name: str, rows: int) -> None:
        """Activations, biases, one projection, experts of somebody else."""
        self.check(bench, replace(BLOCKS[name], kind="dense"), rows)

    @pytest.mark.parametrize("rows", [1, 70])
    @pytest.mark.parametrize("layout", [name for name in PACKERS if name != "dense"])
    def test_layouts(self, bench: Bench, layout: str, rows: int) -> None:
        """Packed weights mean the numbers that the layout says."""
        self.check(bench, replace(EXPERTS, kind=layout), rows)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_other_types(self, bench: Bench, dtype: str) -> None:
        """Narrower computation types."""
        self.check(bench, replace(EXPERTS, kind="dense"), 9, dtype)


def _block(request: ExpertsRequest, rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11 + rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    count, width, inner = request.num_experts, request.hidden_size, request.intermediate_size
    outputs = inner * 2 if request.gated else inner
    pack = PACKERS[request.kind]
    if request.kind == "dense":
        kind = getattr(torch, request.dtype)

        def pack(weight: torch.Tensor) -> Packed:
            return dense(weight, kind)

    pairs = [pack(draw(count, outputs, width) * 0.2), pack(draw(count, width, inner) * 0.2)]
    if "bias" in request.needs:
        pairs = [(replace(m, bias=draw(count, numbers.shape[1])), numbers) for m, numbers in pairs]
    experts = torch.rand(rows, count, generator=generator).argsort(1)[:, : request.top_k]
    if "partial" in request.needs:
        experts[torch.rand(experts.shape, generator=generator) < 0.4] = -1
    weights = draw(rows, request.top_k).softmax(-1)
    return {"x": draw(rows, width), "weights": weights, "experts": experts, "matrices": pairs}


def _placed(matrices: ExpertMatrices, device: torch.device, kind: torch.dtype) -> ExpertMatrices:
    parts = {name: getattr(matrices, name) for name in ("weight", "scale", "zero", "bias")}
    moved = {name: None if part is None else part.to(device) for name, part in parts.items()}
    if moved["bias"] is not None:
        moved["bias"] = moved["bias"].to(kind)
    return ExpertMatrices(matrices.layout, **moved)  # type: ignore[arg-type]


def _loop(request: ExpertsRequest, block: dict[str, Any], kind: torch.dtype) -> torch.Tensor:
    (up, up_XOI), (down, down_XOI) = block["matrices"]
    x = block["x"].to(kind).double()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, chosen in enumerate(block["experts"].tolist()):
        for weight, expert in zip(block["weights"][row].double(), chosen, strict=True):
            if expert < 0:
                continue
            inner = up_XOI[expert] @ x[row] + (0 if up.bias is None else up.bias[expert].to(kind).double())
            result = down_XOI[expert] @ _activate(request, inner)
            out[row] += weight * (result + (0 if down.bias is None else down.bias[expert].to(kind).double()))
    return out


def _activate(request: ExpertsRequest, inner: torch.Tensor) -> torch.Tensor:
    if request.activation == "swiglu_oai":
        gate, up = inner.chunk(2)
        gate, up = gate.clamp(max=request.limit), up.clamp(-request.limit, request.limit)
        return (up + 1) * gate * torch.sigmoid(request.alpha * gate)
    functions: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "relu2": lambda x: F.relu(x) ** 2,
    }
    if not request.gated:
        return functions[request.activation](inner)
    gate, up = inner.chunk(2)
    return functions[request.activation](gate) * up
