"""The fallback on two ranks over gloo: each rank loads saved models and writes its logits to a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from decoders_two_ranks import Results, logits

from jackfield.distributed import SingleCommunicator, TorchCommunicator
from jackfield.errors import ConfigError
from jackfield.interfaces import Communicator
from jackfield_models.transformers_fallback import Transformers

MODELS = ("llama", "one_cache_head", "gpt_neox", "jais2", "dots1", "apertus")
UNCUT = "phi3"
"""Its plan does not cut attention by heads."""


def compute(communicator: Communicator, folder: Path) -> Results:
    """Return each model's logits of all tokens."""
    torch.set_num_threads(1)
    return {name: logits(folder / name, cast(Any, Transformers), communicator) for name in MODELS}


def alone(folder: Path) -> Results:
    """Return what one rank computes."""
    return compute(SingleCommunicator(), folder)


def run_rank(rank: int, size: int, port: int, folder: str) -> None:
    """Be one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        torch.save(compute(TorchCommunicator(), Path(folder)), Path(folder) / f"rank{rank}.pt")
        try:
            logits(Path(folder) / UNCUT, cast(Any, Transformers), TorchCommunicator())
        except ConfigError as error:
            (Path(folder) / f"refused{rank}.txt").write_text(str(error))
    finally:
        dist.destroy_process_group()
