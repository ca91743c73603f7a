"""Recordings on processors: done again, they give what doing it anew gives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from jackfield.interfaces import NotRecorded
from jackfield.worker.graphs import recording
from jackfield_native.library import kernels
from jackfield_native.toolchain import unavailable
from jackfield_platforms import cpu_graphs
from jackfield_platforms.cpu_graphs import CpuGraphs

Work = Callable[[torch.Tensor, torch.Tensor], Any]


def in_place(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    made[:, 1:3] += x[:, :2] * 2
    made.clamp_(min=-0.5)
    table[0, x[0, :3].long().abs() % 4] = made[0, :3]
    return made + table.sum()


def named_results(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = torch.empty(4, 4)
    torch.mm(x, table, out=out)
    best, place = out.max(1)
    first, second = out.split(2, dim=-1)
    return out, best, place, first * second, torch.cat((first, second)).flatten()


def views(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    turned = x.t().reshape(2, 8).contiguous()
    same = x.to(torch.float32).view(16)[3:7].unsqueeze(0)
    return turned, same * 3, same, x.double().argmax(-1), x.unflatten(1, (2, 2)).permute(0, 2, 1).flatten(1)


def modules(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    rows = F.embedding(x.long().abs()[0] % 4, table)
    return F.silu(F.linear(rows, table)).softmax(-1).where(rows > 0, 0.0)


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 4, generator=generator) * 4, torch.randn(4, 4, generator=generator)


def flat(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("work", [in_place, named_results, views, modules])
def test_done_again_is_done_anew(work: Work, inference: bool) -> None:
    api, kept = CpuGraphs(), drawn(0)
    with torch.inference_mode(inference):
        with recording(api, api.new_pool()) as graph:
            results = work(*kept)
        for seed in (1, 2, 2):
            wanted_inputs = drawn(seed)
            for target, source in zip(kept, wanted_inputs, strict=True):
                target.copy_(source)
            api.replay(graph)
            wanted = work(*wanted_inputs)
            for found, other in zip(flat(results), flat(wanted), strict=True):
                assert torch.equal(found, other)
            for target, source in zip(kept, wanted_inputs, strict=True):
                assert torch.equal(target, source), "inputs are written as the work writes them"


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: 1 if x[0] > 0 else 2,
    "equal": lambda x: torch.equal(x, x),
    "counts": lambda x: torch.bincount(x.long().abs()),
    "sizes": lambda x: x.nonzero(),
    "chosen": lambda x: x[x > 0],
    "repeated": lambda x: torch.repeat_interleave(x.long().abs()),
}


@pytest.mark.parametrize("name", READS)
def test_what_depends_on_numbers_is_not_recorded(name: str) -> None:
    x, api = torch.tensor([2.0, -1.0, 0.0]), CpuGraphs()
    with pytest.raises(NotRecorded), recording(api, None):
        READS[name](x)
    READS[name](x)  # nothing is refused any more


def test_nothing_is_recorded_after_work_that_fails() -> None:
    x = torch.ones(3)
    with pytest.raises(ZeroDivisionError), recording(CpuGraphs(), None) as graph:
        x.add(1)
        raise ZeroDivisionError
    assert len(graph.calls) == 1
    assert (x + 1).tolist() == [2.0] * 3 and len(graph.calls) == 1


def test_kernels_that_are_loaded_meanwhile_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter((None, object()))
    monkeypatch.setattr(cpu_graphs, "loaded", lambda: next(found))
    with pytest.raises(NotRecorded, match="loaded meanwhile"), recording(CpuGraphs(), None):
        pass


@pytest.mark.skipif(unavailable() is not None, reason="needs a C compiler")
def test_kernels_in_c_are_done_again() -> None:
    api, x, weight = CpuGraphs(), torch.randn(2, 16), torch.rand(16)
    out = torch.empty(2, 16)
    kernels()

    def norm() -> None:
        pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
        kernels().jf_rms_norm(*pointers, 2, 1, 16, 0, 16, 1e-6, 1)

    def elsewhere() -> None:
        with recording(CpuGraphs(), None):
            norm()

    with recording(api, None) as graph:
        norm()
        thread = threading.Thread(target=norm)
        thread.start()
        thread.join()
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        norm()
    assert len(graph.calls) == 2, "another thread's work is not this one's, nor does its recording end this one"
    norm()
    assert len(graph.calls) == 2, "nor is what comes afterwards"
    x.mul_(3).add_(1)
    api.replay(graph)
    assert torch.allclose(out, F.rms_norm(x, (16,), weight, 1e-6), atol=1e-6)
