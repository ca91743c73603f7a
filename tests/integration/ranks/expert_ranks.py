"""What ranks with some of the experts each compute over gloo; run as a program, which writes the results of rank 0."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from expert_world import CPU, build, numbers
from torch.multiprocessing.spawn import start_processes

from jackfield.distributed import TorchCommunicator
from jackfield.interfaces import MoEConfig, RankInfo
from jackfield.layers.dispatch import AllToAllDispatcher, MaskedDispatcher, Placement

CONFIG = MoEConfig(num_experts=7, top_k=3, hidden_size=8, intermediate_size=4, bias=True)
CONFIGS = {"plain": CONFIG, "weights on inputs": replace(CONFIG, weigh_input=True), "one": replace(CONFIG, top_k=1)}
TOKENS = {2: ((5, 5), (9, 0), (0, 0)), 4: ((3, 0, 8, 1),)}
"""Tokens of each rank."""


def rows(count: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's tokens and their logits."""
    return numbers(count, 8, seed=100 + rank), numbers(count, 7, seed=200 + rank)


def work(rank: int, size: int, folder: str) -> None:
    """Compute everything on one rank and save it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    found = {}
    for kind in ("linear", "round_robin"):
        placement = Placement(7, RankInfo(rank, size), kind)
        for name, config in CONFIGS.items():
            block = build(config, partial=True, held=placement.held(), dispatcher=AllToAllDispatcher(placement, CPU))
            for case, counts in enumerate(TOKENS[size]):
                found[f"{kind} {name} {case}"] = block(*rows(counts[rank], rank))
            masked = MaskedDispatcher(placement, TorchCommunicator(), CPU)
            block = build(config, partial=True, held=placement.held(), dispatcher=masked)
            found[f"{kind} {name} masked"] = block(*rows(6, 0))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    size, folder = int(sys.argv[1]), sys.argv[2]
    start_processes(work, (size, folder), nprocs=size, start_method="fork")  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
