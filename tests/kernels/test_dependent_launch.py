"""Programmatic dependent launch without a device. What a kernel before may still be writing is hidden (NaN, or what
would be out of bounds) from the start of every program until the program waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from op_checks import angles_of, draw
from paged_case import Case, Shape, attend, limits_of, make_case

from jackfield.interfaces import DeviceFacts, OpRequest, PendingNorm, QuantizedActivation
from jackfield.interfaces.plugin import Settings
from jackfield_attention.flash_attn import FlashAttnBackend
from jackfield_attention.triton_backend import TritonBackend
from jackfield_ops.triton_launch import LAUNCHERS
from jackfield_ops.triton_ops import TritonOps
from jackfield_quantization.triton_dense import TritonDense
from jackfield_quantization.triton_dense_launch import skinny_product, splits_used
from jackfield_quantization.triton_dense_plan import SkinnyShape
from jackfield_quantization.triton_dense_scheme import SkinnyScheme
from jackfield_triton import launch

HALF = torch.float16


class Predecessor:
    """Stands for the kernel before: it hides tensors while a program runs that has not waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        self.events: list[str] = []
        monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", self.begin)
        monkeypatch.setattr(tl.extra.cuda, "gdc_wait", self.end)

    def begin(self) -> None:
        """Hide; called where a program lets the next kernel start, which is the first thing that it does."""
        self.events.append("released")
        self.kept = [tensor.clone() for tensor in self.tensors]
        for tensor in self.tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)

    def end(self) -> None:
        """Show; nothing may have been written meanwhile."""
        self.events.append("waited")
        for tensor, kept in zip(self.tensors, self.kept, strict=True):
            hidden = float("nan") if tensor.is_floating_point() else 0
            assert torch.equal(tensor.nan_to_num(9.0), torch.full_like(tensor, hidden).nan_to_num(9.0))
            tensor.copy_(kept)

    def during(self, hidden: Iterable[torch.Tensor], work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns; ``hidden`` is what a predecessor may write."""
        self.tensors, self.events = list(hidden), []
        return work()

    def programs(self) -> int:
        """Return how many programs ran, each of which let the next kernel start and then waited, once."""
        assert self.events == ["released", "waited"] * (len(self.events) // 2)
        return len(self.events) // 2


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Iterator[Predecessor]:
    yield Predecessor(monkeypatch)


@pytest.mark.parametrize("op", LAUNCHERS)
def test_ops_wait_for_all_but_weights(op: str, before: Predecessor) -> None:
    x, residual, weight = (draw(3, 80, dtype=HALF, seed=seed) for seed in range(3))
    heads, angles = x.clone().view(3, 5, 16), angles_of(3, 16)
    arguments: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, weight[0], 1e-6),
        "fused_add_rms_norm": (x, residual, weight[0], 1e-6),
        "rotary": (heads, angles),
    }
    mine = arguments.get(op.removesuffix("_quant"), (x,))
    hidden = [tensor for tensor in (x, residual, heads, angles) if any(tensor is value for value in mine)]
    plain = LAUNCHERS[op](*(value.clone() if value is heads else value for value in mine))
    found = before.during(hidden, lambda: LAUNCHERS[op](*mine, pdl=True))
    pairs = list(zip(tensors(found), tensors(plain), strict=True))
    assert pairs and all(torch.equal(ours, wanted) for ours, wanted in pairs)
    assert before.programs() == 3


def tensors(result: Any) -> list[torch.Tensor]:
    """Return what an op returned, tensor by tensor; 8-bit floats as the bytes they are."""
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in tensors(part)]
    if isinstance(result, QuantizedActivation):
        return [result.values.view(torch.uint8), result.scales]
    return [result]


@pytest.mark.parametrize("rows", [1, 2, 4, 16])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("inputs", "splits"), [(32, 1), (64, 1), (160, 1), (160, 4), (150, 2), (20, 3)])
def test_products_wait_for_all_but_weights(
    inputs: int, splits: int, stages: int, rows: int, before: Predecessor
) -> None:
    shape = SkinnyShape(16, 32, splits, 4, stages, matrix=rows > 4)
    x, weight, bias = (draw(n, inputs, dtype=HALF, seed=n) for n in (rows, 24, 25))
    counters, out = torch.zeros(2, dtype=torch.int32), torch.zeros(rows, 24, dtype=HALF)
    bias = bias[:24, 0].contiguous()
    wanted = skinny_product(x, weight, bias, torch.empty_like(out), shape, counters)
    found = before.during([x, out], lambda: skinny_product(x, weight, bias, out, shape, counters, pdl=True))
    assert torch.equal(found, wanted)
    assert before.programs() == 2 * splits_used(inputs, shape)
    assert not counters.any()


@pytest.mark.parametrize(("rows", "matrix"), [(1, False), (1, True), (5, True)])
@pytest.mark.parametrize("inputs", [32, 150])
def test_folded_norms_wait_for_both_streams(inputs: int, rows: int, matrix: bool, before: Predecessor) -> None:
    shape = SkinnyShape(16, 32, 1, 4, 1, matrix=matrix)
    x, residual, weight, factor = (draw(n, inputs, dtype=HALF, seed=n) for n in (rows, rows, 24, 1))
    counters, out = torch.zeros(2, dtype=torch.int32), torch.zeros(rows, 12, dtype=HALF)
    given = PendingNorm(x, residual, torch.zeros_like(x), factor[0], 1e-6)
    assert given.total is not None
    wanted = skinny_product(given, weight, None, torch.empty_like(out), shape, counters, gate="silu").clone()
    given.total.zero_()
    hidden = [x, residual, out, given.total]
    found = before.during(hidden, lambda: skinny_product(given, weight, None, out, shape, counters, True, gate="silu"))
    assert torch.equal(found, wanted) and torch.equal(given.total, x + residual)
    assert before.programs() == 2


def overlapped(case: Case) -> tuple[Any, Any]:
    """Return the layer of a case as it is on a device, and the metadata."""
    builder, layer = TritonBackend.metadata_builder(case.env), TritonBackend.layer(case.env, 0)
    builder.allocate(limits_of(case))
    return layer, builder.build(case.step)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_waits_in_every_program(splits: int, before: Predecessor) -> None:
    settings = {"decode_splits": splits, "decode_tile": 16}
    case = make_case(TritonBackend, Shape([1, 1, 1], [5, 40, 90], dtype="float16", settings=settings))
    layer, metadata = overlapped(case)
    wanted = attend(layer, case, metadata)
    layer.pdl = True
    inputs = [case.qkv, *case.cache.values(), case.step.lengths, case.step.block_table]
    found = before.during(inputs, lambda: attend(layer, case, metadata))
    assert torch.equal(found, wanted)
    assert before.programs() == 3 * 2 * splits


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("turned", [0, 12, 32])
def test_prepare_waits_in_every_program(turned: int, norm: bool, before: Predecessor) -> None:
    first, second = (
        make_case(TritonBackend, Shape([1, 2], [1, 20], heads=4, kv_heads=2, dtype="float16")) for _ in range(2)
    )
    weights = [draw(32, dtype=HALF, seed=seed) if norm else None for seed in (1, 2)]
    angles = angles_of(3, turned) if turned else None
    layer, _ = overlapped(first)
    layer.prepare(first.qkv, angles, *weights, 1e-6, first.cache, first.step.slots)
    layer.pdl = True
    hidden = [second.qkv, second.step.slots, *second.cache.values(), *([] if angles is None else [angles])]
    before.during(hidden, lambda: layer.prepare(second.qkv, angles, *weights, 1e-6, second.cache, second.step.slots))
    assert before.programs() == 3 * 3
    assert torch.equal(first.qkv, second.qkv)
    for name, plane in first.cache.items():
        assert torch.equal(plane.nan_to_num(7.0), second.cache[name].nan_to_num(7.0))


def test_who_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [launch.pdl_of(capability) for capability in ((0, 0), (8, 9), (9, 0), (12, 0))] == [False, False, True, True]
    assert not launch.pdl_of((9, 0), wanted=False)
    assert launch.launch_options(True) == {"PDL": True, "launch_pdl": True}
    assert launch.launch_options(False) == {"PDL": False}
    monkeypatch.setattr(launch, "INSTRUCTIONS", "triton.language.extra.cuda.no_such_module")
    assert not launch.pdl_of((9, 0))


def built(capability: tuple[int, int], **settings: bool) -> bool:
    """Return whether an op is built to overlap."""
    request = OpRequest(kind="rotary", device=DeviceFacts("cuda", capability=capability))
    function: Any = TritonOps.build("rotary", request, Settings(settings))
    return bool(function.keywords["pdl"])


def test_the_option_and_the_device_decide_for_ops() -> None:
    assert built((9, 0))
    assert built((9, 0), pdl=True)
    assert not built((9, 0), pdl=False)
    assert not built((8, 0), pdl=True)
    assert TritonOps.options["pdl"].default is True


def test_the_option_and_the_device_decide_for_attention() -> None:
    env = make_case(TritonBackend, Shape([1], [5])).env
    assert not TritonBackend.layer(env, 0).pdl
    there = replace(env, device=torch.device("cuda"))
    assert TritonBackend.layer(there, 0).pdl
    assert not TritonBackend.layer(replace(there, settings=Settings({"pdl": False})), 0).pdl
    assert FlashAttnBackend.layer(there, 0).pdl
    assert TritonBackend.options["pdl"].default is FlashAttnBackend.options["pdl"].default is True


class Apart(TritonDense):
    """The method without overlap."""

    name = "triton_dense_apart"
    pdl = False


def test_a_subclass_turns_overlap_off_for_dense_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[bool] = []
    monkeypatch.setattr(SkinnyScheme, "__init__", lambda self, pdl: wanted.append(pdl))
    info: Any = type("Info", (), {"num_experts": 0})
    TritonDense.scheme(info, None)
    Apart.scheme(info, None)
    assert wanted == [True, False]
