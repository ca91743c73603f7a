"""What FlashInfer is asked for, by a stand-in that computes in float64 exactly what it is told, beside Triton's kernels
for the rest of the step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from paged_case import TOLERANCE, Shape, attend, error, expected, limits_of, make_case

from jackfield.errors import ConfigError
from jackfield.interfaces import DeviceFacts
from jackfield.interfaces.attention import PROMPT_TOKENS
from jackfield_attention.flashinfer import FlashInferBackend


class StandIn:
    """``BatchPrefillWithPagedKVCacheWrapper`` as its documents describe it."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, backend: str) -> None:
        assert workspace.dtype == torch.uint8 and backend in ("fa2", "fa3")
        self.layout, self.plans = layout, 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert all(x.dtype == torch.int32 for x in (qo_indptr, paged_kv_indptr, paged_kv_indices))
        assert options.pop("causal") is True
        self.queries, self.starts = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.pages, self.last = paged_kv_indices.tolist(), paged_kv_last_page_len.tolist()
        self.group, self.page_size, self.options = num_qo_heads // num_kv_heads, page_size, options
        self.plans += 1

    def run(self, q: torch.Tensor, planes: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        assert len(q) == self.queries[-1]
        out = torch.empty_like(q) if out is None else out
        for index, last in enumerate(self.last):
            pages = self.pages[self.starts[index] : self.starts[index + 1]]
            length = (len(pages) - 1) * self.page_size + last
            k, v = (self._tokens(plane, pages)[:length] for plane in planes)
            rows = slice(self.queries[index], self.queries[index + 1])
            out[rows] = self._mixed(q[rows].double(), k, v).to(out.dtype)
        return out

    def _tokens(self, plane: torch.Tensor, pages: list[int]) -> torch.Tensor:
        found = plane[pages].double()
        found = found.transpose(1, 2) if self.layout == "HND" else found
        return found.flatten(0, 1).repeat_interleave(self.group, 1)

    def _mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.options["sm_scale"]
        if cap := self.options["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        back = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
        seen = back >= 0
        if (left := self.options["window_left"]) >= 0:
            seen &= back <= left
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    yield
    sys.modules.pop("jackfield_attention.flashinfer_layer", None)


SHAPES = {
    "prompts": Shape([130, 140], [130, 140], dtype="float16", size=64),
    "chunks": Shape([130, 128], [200, 131], dtype="float16", size=64),
    "beside decodes": Shape([1, 1, 130], [5, 40, 150], dtype="float16", size=64),
    "a short one between": Shape([1, 130, 5, 128], [5, 130, 20, 160], dtype="float16", size=64),
    "short ones alone": Shape([1, 5, 9], [5, 30, 20], dtype="float16", size=64),
    "decodes alone": Shape([1, 1], [5, 30], dtype="float16", size=64),
    "in a window": Shape([130, 140], [190, 140], dtype="float16", size=64, window=20),
    "softcap": Shape([1, 130], [15, 130], dtype="float16", size=64, softcap=3.0),
    "tokens outside heads": Shape([1, 130], [15, 150], dtype="float16", size=64, layout=1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_token_attends_as_defined(name: str) -> None:
    case = make_case(FlashInferBackend, SHAPES[name])
    builder, layer = FlashInferBackend.metadata_builder(case.env), FlashInferBackend.layer(case.env, 0)
    builder.allocate(limits_of(case))
    metadata = builder.build(case.step)
    out = attend(layer, case, metadata)
    assert error(out, expected(case)) < TOLERANCE["float16"]
    assert torch.equal(attend(layer, case, metadata), out)
    planned = max(case.shape.counts) >= PROMPT_TOKENS
    assert plans(builder) == int(planned), "one plan for a step, and none where nothing is long"


def plans(builder: Any) -> int:
    """Return how often a builder planned."""
    return sum(wrapper.plans for wrapper in builder._wrappers)


def test_a_plan_is_left_alone_while_the_next_one_is_made() -> None:
    """The device may come to a step only when the host has planned the one behind it."""
    case = make_case(FlashInferBackend, SHAPES["prompts"])
    builder, layer = FlashInferBackend.metadata_builder(case.env), FlashInferBackend.layer(case.env, 0)
    builder.allocate(limits_of(case))
    first, second, third = (builder.build(case.step) for _ in range(3))
    assert first.planned is not second.planned and second.planned is not third.planned
    assert plans(builder) == 3
    assert error(attend(layer, case, second), expected(case)) < TOLERANCE["float16"]


def test_kernels_that_the_device_does_not_run_are_refused() -> None:
    case = make_case(FlashInferBackend, replace(SHAPES["prompts"], settings={"kernels": "fa3"}))
    device = replace(case.env.request.device or DeviceFacts("cuda"), capability=(8, 0))
    env = replace(case.env, request=replace(case.env.request, device=device))
    with pytest.raises(ConfigError, match=r"fa3 need capability 9\.0") as caught:
        FlashInferBackend.metadata_builder(env).allocate(limits_of(case))
    assert caught.value.remedy == "use fa2, or leave it out"


def test_recorded_steps_have_no_prompts() -> None:
    case = make_case(FlashInferBackend, SHAPES["decodes alone"])
    builder = FlashInferBackend.metadata_builder(case.env)
    builder.allocate(limits_of(case))
    assert builder.capture(2, 1).tokens is None
