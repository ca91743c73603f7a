"""Products of many rows on the device against float64, through the schemes and backends that launch them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from op_checks import draw
from recording import record

from jackfield.interfaces import LayerInfo, MoEConfig, OutputShard, Parallel
from jackfield.interfaces.moe import ExpertMatrices, experts_request
from jackfield_moe.gluon_experts import GluonExperts
from jackfield_platforms.cuda_device import CudaGraphs
from jackfield_quantization.gluon_dense_scheme import GatedScheme
from jackfield_triton.rows_product import has_wide_groups, rows_product

pytestmark = pytest.mark.gpu
BOUND = 6e-3


@pytest.fixture(autouse=True)
def capable() -> None:
    if not has_wide_groups(torch.cuda.get_device_capability()):
        pytest.skip("the kernel's matrix instructions are those of capability 9.0")


def cores() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def gated(product: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    gate, up = product.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(4096, 1024), (1000, 2056), (256, 64), (2816, 72)], ids=str)
@pytest.mark.parametrize("rows", [1, 64, 65, 128, 129, 1000, 5000])
def test_one_matrix(rows: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    outputs, inputs = sizes
    x, weight = (draw(n, inputs, dtype=dtype, device="cuda", seed=n) for n in (rows, outputs))
    wanted = x.double() @ weight.double().T
    out = x.new_full((rows, outputs), float("nan"))
    rows_product(x, weight[None], out, cores(), pdl=True)
    assert error(out, wanted) < BOUND
    for activation in ("silu", "gelu_tanh"):
        out = x.new_full((rows, outputs // 2), float("nan"))
        rows_product(x, (weight / inputs**0.5)[None], out, cores(), activation=activation, pdl=True)
        assert error(out, gated(x.double() @ (weight / inputs**0.5).double().T, activation)) < BOUND


class Layer:
    """The least a layer can be, finalized."""

    def __init__(self, outputs: int, inputs: int) -> None:
        self.info = LayerInfo("up", inputs, (OutputShard("", outputs),), Parallel.REPLICATED, dtype="bfloat16")
        self.weight = draw(outputs, inputs, dtype=torch.bfloat16, device="cuda", seed=2) / inputs**0.5
        self.scheme = GatedScheme()
        self.scheme.finalize(self)

    def get_parameter(self, target: str) -> torch.Tensor:
        assert target == "weight"
        return self.weight

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError


def test_the_scheme_folds_the_activation_and_replays_it() -> None:
    layer, x = Layer(6144, 1024), draw(4096, 1024, dtype=torch.bfloat16, device="cuda", seed=7)
    assert "silu_and_mul" in layer.scheme.folded_ops(layer.info, len(x))
    assert "rms_norm" not in layer.scheme.folded_ops(layer.info, len(x))
    found = x.new_empty((len(x), 3072))
    graph = record(
        CudaGraphs(torch.device("cuda")),
        lambda: found.copy_(layer.scheme.apply_folded(layer, x, None, "silu_and_mul")),
    )
    for factor in (1.0, 2.0):
        x.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        wanted = gated(x.double() @ layer.weight.double().T)
        assert error(found, wanted) < BOUND


BLOCK = MoEConfig(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)


@pytest.mark.parametrize("rows", [3072, 3100, 8192])
@pytest.mark.parametrize("kind", ["random", "one", "skewed", "partial"])
def test_experts(kind: str, rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    scores = torch.rand(rows, 128, device="cuda", generator=generator)
    if kind == "skewed":
        scores += torch.arange(128, device="cuda") / 64
    experts = scores.topk(8).indices
    if kind == "one":
        experts = torch.arange(8, device="cuda").repeat(rows, 1)
    if kind == "partial":
        experts[::3, 2:] = -1
    request = experts_request(BLOCK, "dense", dtype="bfloat16", partial=kind == "partial")
    sizes = ((1536, 2048), (2048, 768))
    up, down = (torch.randn(128, *s, device="cuda", dtype=torch.bfloat16) * s[1] ** -0.5 for s in sizes)
    x = draw(rows, 2048, dtype=torch.bfloat16, device="cuda", seed=3)
    weights = torch.rand(rows, 8, device="cuda", generator=generator)
    found = GluonExperts.build(request).apply(
        x, ExpertMatrices("dense", up), ExpertMatrices("dense", down), weights, experts
    )
    wanted = torch.zeros(rows, 2048, device="cuda")
    for expert in range(128):
        row, place = (experts == expert).nonzero(as_tuple=True)
        part = gated(x[row].float() @ up[expert].float().T) @ down[expert].float().T
        wanted.index_add_(0, row, part * weights[row, place, None])
    assert error(found, wanted.double()) < BOUND


def test_results_do_not_depend_on_the_run() -> None:
    """Groups of warps race for the matrix units, and must not for anything else."""
    layer = Layer(6144, 1024)
    x = draw(8192, 1024, dtype=torch.bfloat16, device="cuda", seed=7)
    first = layer.scheme.apply_folded(layer, x, None, "silu_and_mul")
    for _ in range(200):
        assert torch.equal(layer.scheme.apply_folded(layer, x, None, "silu_and_mul"), first)


def test_experts_do_not_depend_on_the_run() -> None:
    request = experts_request(BLOCK, "dense", dtype="bfloat16")
    up, down = (
        torch.randn(128, *s, device="cuda", dtype=torch.bfloat16) * s[1] ** -0.5 for s in ((1536, 2048), (2048, 768))
    )
    matrices = ExpertMatrices("dense", up), ExpertMatrices("dense", down)
    x = draw(4096, 2048, dtype=torch.bfloat16, device="cuda", seed=3)
    experts, weights = torch.rand(4096, 128, device="cuda").topk(8).indices, torch.rand(4096, 8, device="cuda")
    backend = GluonExperts.build(request)
    first = backend.apply(x, *matrices, weights, experts)
    for _ in range(100):
        assert torch.equal(backend.apply(x, *matrices, weights, experts), first)
