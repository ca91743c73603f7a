"""What two ranks compute over gloo; each writes its results to a file, and the tests compare them with one rank."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layer_world import Llama, Qwen3, TinyModel, build_plan, fill, llama_config, random_weights

from jackfield.distributed import SingleCommunicator, TorchCommunicator
from jackfield.interfaces import Communicator, MoEConfig, OutputShard, Parallel
from jackfield.layers.builder import LayerBuilder

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [7], [2, 7, 1, 8, 2]]
MOE = MoEConfig(num_experts=4, top_k=2, hidden_size=8, intermediate_size=6)
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "one cache head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "odd vocabulary": {"vocab_size": 31},
    "odd vocabulary, tied": {"vocab_size": 31, "tie_word_embeddings": True},
}
Results = dict[str, torch.Tensor]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compute(communicator: Communicator) -> Results:
    """Return everything that is compared."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        results = layers(communicator) | experts(communicator)
    for name, values in MODELS.items():
        config = llama_config(**values)
        results[f"model: {name}"] = TinyModel(config, random_weights(config, Llama), communicator).run(PROMPTS)
    config = llama_config(Qwen3)
    model = TinyModel(config, random_weights(config, Qwen3), communicator, Qwen3)
    results["model: normed heads"] = model.run(PROMPTS)
    return results


def layers(communicator: Communicator) -> Results:
    """COLUMN then ROW, with biases; embedding and head, with a vocabulary that divides and one that does not."""
    made = LayerBuilder(build_plan(communicator))
    shards = [OutputShard("gate", 12), OutputShard("up", 12)]
    up = made.linear("up", 8, shards, bias=True, parallel=Parallel.COLUMN)
    fill(
        up,
        {
            f"{s}.{x}": numbers(*((12, 8) if x == "weight" else (12,)), seed=len(s))
            for s in ("gate", "up")
            for x in ("weight", "bias")
        },
    )
    down = made.linear("down", 12, 8, bias=True, parallel=Parallel.ROW)
    fill(down, {"weight": numbers(8, 12, seed=3), "bias": numbers(8, seed=4)})
    x = numbers(5, 8, seed=5)
    results = {"column, row": down(made.activation("silu")(up(x)))}
    for rows in (10, 11):
        table = numbers(rows, 8, seed=6)
        embedding, head = made.embedding("embed", rows, 8), made.head("head", rows, 8)
        tied = made.head("tied", rows, 8, tied=embedding)
        fill(embedding, {"weight": table})
        fill(head, {"weight": table})
        results[f"embedding {rows}"] = embedding(torch.arange(rows))
        results[f"head {rows}"] = head(x)
        results[f"tied head {rows}"] = tied(x)
    return results


def experts(communicator: Communicator) -> Results:
    """A block of routed experts."""
    made = LayerBuilder(build_plan(communicator))
    results = {}
    for name, config in {"softmax": MOE, "sigmoid": replace(MOE, scoring="sigmoid", renormalize=False)}.items():
        block = made.moe("moe", config)
        load_experts(block)
        results[f"experts: {name}"] = block(numbers(7, 8, seed=1), numbers(7, 4, seed=2))
    return results


def load_experts(block: Any) -> None:
    """Fill a block of experts with the same numbers on every rank."""
    for expert in range(MOE.num_experts):
        for shard, seed in (("gate", 10), ("up", 20)):
            assert block.gate_up.load_expert(expert, shard, "weight", numbers(6, 8, seed=seed + expert))
        assert block.down.load_expert(expert, "", "weight", numbers(8, 6, seed=30 + expert))
    assert block.gate_up.unfilled() == [] and block.down.unfilled() == []
    for part in (block.gate_up, block.down):
        part.finalize()


def alone() -> Results:
    """Return what one rank computes."""
    return compute(SingleCommunicator())


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_rank(rank: int, size: int, port: int, folder: str) -> None:
    """Be one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        communicator = TorchCommunicator()
        results = compute(communicator)
        results["broadcast"] = communicator.broadcast(torch.full((3,), float(rank)), source=1)
        results["all_gather"] = communicator.all_gather(torch.full((2, 1), float(rank)), dim=1)
        torch.save(results, Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def save_drawn(model: Any, folder: Path) -> torch.Tensor:
    """Draw norms and biases of a model of transformers, save it, and return its logits of all prompts' tokens."""
    model = model.float().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1 or "norm" in path:
                parameter.normal_(0.0 if path.endswith("bias") else 1.0, 0.3)
        logits = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    model.save_pretrained(folder)
    return logits
