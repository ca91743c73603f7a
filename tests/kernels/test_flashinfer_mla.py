"""What FlashInfer is asked for over latents, by a stand-in that computes in float64 exactly what it is told, beside
Triton's kernels for the rest of the step.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from jackfield.errors import ConfigError
from jackfield.interfaces import AttentionEnv, AttentionRequest, AttentionStep, DeviceFacts, RankInfo, StepLimits
from jackfield.testing.attention_cases import Query, make_step, settings_of
from jackfield.testing.latent_cases import DenseLayer, latent_attention
from jackfield_attention.flashinfer_mla import FlashInferMlaBackend
from jackfield_attention.torch_mla import TorchMlaBackend

CPU = torch.device("cpu")
BOUND = 1e-3
REQUEST = AttentionRequest(
    kind="mla",
    dtype="float16",
    device=DeviceFacts("cuda", capability=(9, 0), cores=4),
    num_heads=4,
    num_kv_heads=1,
    head_size=80,
    value_head_size=24,
    scale=80**-0.5,
    extra={"latent_size": 512, "rope_size": 64},
)


class StandIn:
    """``BatchMLAPagedAttentionWrapper`` as its documents describe it, without graphs and narrow latents."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.numel() * float_workspace_buffer.element_size() >= 32 << 20
        assert not use_cuda_graph
        self.backend, self.plans, self.runs = backend, 0, 0
        MADE.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        assert all(x.dtype == torch.int32 for x in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1 and len(kv_indices) >= int(kv_indptr[-1])
        self.queries, self.starts = qo_indptr.tolist(), kv_indptr.tolist()
        self.pages, self.lengths = kv_indices.tolist(), kv_len_arr.tolist()
        self.heads, self.sizes, self.page_size = num_heads, (head_dim_ckv, head_dim_kpe), page_size
        self.causal, self.scale, self.types = causal, sm_scale, (q_data_type, kv_data_type)
        assert not use_profiler
        self.plans += 1

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> torch.Tensor:
        tokens, (latent, rope) = self.queries[-1], self.sizes
        assert q_nope.shape == (tokens, self.heads, latent) and q_pe.shape == (tokens, self.heads, rope)
        assert ckv_cache.shape[1:] == (self.page_size, latent) and kpe_cache.shape[1:] == (self.page_size, rope)
        assert (q_nope.dtype, q_pe.dtype, ckv_cache.dtype, kpe_cache.dtype) == tuple(
            t for t in self.types for _ in "ab"
        )
        out = torch.empty_like(q_nope) if out is None else out
        assert out.shape == q_nope.shape and out.dtype == q_nope.dtype
        assert all(loadable(x) for x in (q_nope, q_pe, ckv_cache, kpe_cache, out))
        assert not any((return_lse, return_lse_base_on_e))
        others = (lse, profiler_buffer, kv_len, page_table, o_scale, ckv_scale, ckv_scale_arr, kpe_scale)
        assert all(x is None for x in others)
        for index, length in enumerate(self.lengths):
            pages = self.pages[self.starts[index] : self.starts[index + 1]]
            c, k = (cache[pages].double().flatten(0, 1)[:length] for cache in (ckv_cache, kpe_cache))
            assert len(c) == length, "the pages hold every token"
            rows = slice(self.queries[index], self.queries[index + 1])
            out[rows] = self._mixed(q_nope[rows].double(), q_pe[rows].double(), c, k).to(out.dtype)
        self.runs += 1
        return out

    def _mixed(self, q: torch.Tensor, p: torch.Tensor, c: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = (torch.einsum("qhr,lr->hql", q, c) + torch.einsum("qhp,lp->hql", p, k)) * self.scale
        if self.causal:
            ends = torch.arange(len(c) - len(q), len(c)).unsqueeze(1)
            scores = scores.masked_fill(torch.arange(len(c)) > ends, float("-inf"))
        return torch.einsum("hql,lr->qhr", scores.softmax(-1), c)


MADE: list[StandIn] = []


def loadable(x: torch.Tensor) -> bool:
    """Return whether every row can be loaded 16 bytes at once, as the kernels do."""
    size = x.element_size()
    return x.stride(-1) == 1 and all(n * size % 16 == 0 for n in (x.storage_offset(), *x.stride()[:-1]))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module, package = ModuleType("flashinfer.mla"), ModuleType("flashinfer")
    module.BatchMLAPagedAttentionWrapper = StandIn  # type: ignore[attr-defined]
    package.mla = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    MADE.clear()
    yield
    sys.modules.pop("jackfield_attention.flashinfer_mla_layer", None)


STEPS: dict[str, list[Query]] = {
    "one token": [Query(1, 0)],
    "ragged": [Query(1, 20), Query(1, 3), Query(1, 0), Query(1, 150), Query(1, 63), Query(1, 64)],
    "mixed": [Query(1, 41), Query(1, 0), Query(5, 12), Query(2, 30), Query(1, 7)],
    "prompts": [Query(9, 0), Query(30, 17)],
}


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize("step", STEPS)
def test_it_equals_the_definition(step: str, block: int) -> None:
    found, wanted = latent_attention(FlashInferMlaBackend, REQUEST, STEPS[step], CPU, block=block)
    assert float((found - wanted).norm() / wanted.norm()) < BOUND
    assert [w.backend for w in MADE] == ["fa3"] * len(MADE)
    planned = any(q.new == 1 for q in STEPS[step])
    assert sum(w.plans for w in MADE) == sum(w.runs for w in MADE) == int(planned)


@pytest.mark.parametrize("heads", [1, 20])
def test_any_number_of_heads(heads: int) -> None:
    found, wanted = latent_attention(FlashInferMlaBackend, replace(REQUEST, num_heads=heads), STEPS["mixed"], CPU)
    assert float((found - wanted).norm() / wanted.norm()) < BOUND


def env_of(request: AttentionRequest = REQUEST, **options: Any) -> AttentionEnv:
    settings = settings_of(FlashInferMlaBackend)
    settings = replace(settings, values={**settings.values, **options})
    return AttentionEnv(request, FlashInferMlaBackend.cache_specs(request)[0], 4, CPU, settings)


def drawn(queries: Sequence[Query], heads: int) -> tuple[AttentionStep, torch.Tensor, torch.Tensor]:
    """Return a step, its queries [T, H, D], and pages of latents that were written before."""
    generator = torch.Generator().manual_seed(3)
    step = make_step(queries, 4, np.random.default_rng(2).permutation(np.arange(60, dtype=np.int32)))
    q_THD = torch.randn((step.num_tokens, heads, REQUEST.head_size), generator=generator).half()
    return step, q_THD, torch.randn((60, 4, 576), generator=generator).half()


def attend(layer: Any, q_THD: torch.Tensor, latent_GBJ: torch.Tensor, metadata: Any) -> torch.Tensor:
    out_THV = q_THD.new_full((*q_THD.shape[:2], REQUEST.value_head_size), float("nan"))
    layer.attend(q_THD, {"latent": latent_GBJ}, metadata, out_THV)
    return out_THV


def bound_layer(backend: Any, env: AttentionEnv) -> Any:
    heads, each = env.request.local_heads, REQUEST.head_size - 64 + REQUEST.value_head_size
    weight = torch.randn((heads * each, 512), generator=torch.Generator().manual_seed(1)) * 0.2
    layer = backend.layer(env, 0)
    layer.bind(DenseLayer(weight.half(), each))
    return layer


def test_layers_share_the_plan_of_a_step_and_the_next_one_leaves_it_alone() -> None:
    env = env_of()
    builder = FlashInferMlaBackend.metadata_builder(env)
    builder.allocate(StepLimits(64, 16, 40, 160))
    layers = [bound_layer(FlashInferMlaBackend, env) for _ in range(2)]
    step, q, latents = drawn([Query(1, 30), Query(1, 9)], 4)
    metadata = builder.build(step)
    first = attend(layers[0], q, latents, metadata)
    assert [w.plans for w in MADE].count(1) == 1 and sum(w.plans for w in MADE) == 1
    builder.build(drawn([Query(1, 2), Query(1, 60), Query(1, 5)], 4)[0])
    assert torch.equal(attend(layers[1], q, latents, metadata), first)
    assert sum(w.plans for w in MADE) == 2


def test_a_rank_has_its_own_heads_and_pages_may_lie_apart() -> None:
    """The pages of a layer may be every third of a larger tensor."""
    env = env_of(replace(REQUEST, num_heads=8, rank=RankInfo(1, 2)))
    builder = FlashInferMlaBackend.metadata_builder(env)
    builder.allocate(StepLimits(64, 16, 40, 160))
    step, q, latents = drawn([Query(1, 30), Query(1, 9), Query(6, 11)], 4)
    apart = torch.full((60, 3, 4, 576), float("nan"), dtype=torch.float16)
    apart[:, 1] = latents
    found = attend(bound_layer(FlashInferMlaBackend, env), q, apart[:, 1], builder.build(step))
    reference = replace(env, settings=settings_of(TorchMlaBackend))
    wide = bound_layer(TorchMlaBackend, reference)
    wanted = attend(wide, q, latents, TorchMlaBackend.metadata_builder(reference).build(step))
    assert float((found - wanted).float().norm() / wanted.float().norm()) < BOUND


def test_kernels_that_the_device_does_not_run_are_refused() -> None:
    device = DeviceFacts("cuda", capability=(8, 0), cores=108)
    older = replace(REQUEST, device=device)
    builder = FlashInferMlaBackend.metadata_builder(env_of(older, kernels="fa3"))
    with pytest.raises(ConfigError, match=r"fa3 need capability 9\.0") as caught:
        builder.allocate(StepLimits(64, 16, 40, 160))
    assert caught.value.remedy == "use fa2, or leave it out" and not MADE
    FlashInferMlaBackend.metadata_builder(env_of(older)).allocate(StepLimits(64, 16, 40, 160))
    assert {w.backend for w in MADE} == {"fa2"}


def test_more_sequences_than_a_plan_has_room_for_are_refused() -> None:
    many = replace(REQUEST, num_heads=129)
    builder = FlashInferMlaBackend.metadata_builder(env_of(many))
    with pytest.raises(ConfigError, match="room for 8190 sequences"):
        builder.allocate(StepLimits(9000, 8191, 40, 160))
    builder.allocate(StepLimits(9000, 8190, 40, 160))


def test_no_step_is_recorded() -> None:
    builder = FlashInferMlaBackend.metadata_builder(env_of())
    builder.allocate(StepLimits(64, 16, 40, 160))
    with pytest.raises(NotImplementedError, match="part of a graph"):
        builder.capture(2, 1)


def signatures(source: str, name: str) -> dict[str, list[tuple[str, str, str]]]:
    """Return kind, name and default of each argument of the methods that the plugin calls; of overloaded ones those of
    the last, which is the definition.
    """
    found: dict[str, list[tuple[str, str, str]]] = {}
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in next(classes).body:
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "plan", "run"):
            arguments = node.args
            plain = [*arguments.posonlyargs, *arguments.args]
            defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
            rows = [("plain", a.arg, d) for a, d in zip(plain, defaults, strict=True)]
            rows += [("named", a.arg, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
            found[node.name] = [(kind, arg, "" if d is None else ast.unparse(d)) for kind, arg, d in rows]
    return found


def test_the_stand_in_is_called_as_the_real_one() -> None:
    """The source is read and not imported: without a device it cannot be."""
    try:
        package = distribution("flashinfer-python")
    except PackageNotFoundError:
        pytest.skip("FlashInfer is not installed here, so there is no source to compare with")
    path = Path(str(package.locate_file("flashinfer/mla/_core.py")))
    real = signatures(path.read_text(), "BatchMLAPagedAttentionWrapper")
    assert signatures(textwrap.dedent(inspect.getsource(StandIn)), "StandIn") == real
