"""Decoders of every family on two ranks over gloo: each rank loads a saved model and writes its logits to a file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from layer_world import BLOCK, CPU, build_plan, environment, prefill_step
from two_ranks import PROMPTS

from jackfield.checkpoint import JsonConfigReader, open_tensors, read_facts
from jackfield.distributed import SingleCommunicator, TorchCommunicator
from jackfield.interfaces import Communicator
from jackfield.kv_cache import CacheGroup, CachePlan
from jackfield.layers.builder import LayerAttention, LayerBuilder
from jackfield.loader import load_weights
from jackfield.worker.context import StepContext
from jackfield.worker.storage import allocate_cache
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_models.bloom import Bloom, Falcon, Opt
from jackfield_models.cohere import Cohere
from jackfield_models.decoder import Decoder
from jackfield_models.gemma import Gemma3
from jackfield_models.gpt import Gpt2, GptBigCode, GptNeoX
from jackfield_models.olmo import Olmo2
from jackfield_models.relatives import Phi3
from jackfield_models.variants import Glm4, StableLm

ARCHITECTURES: dict[str, type[Decoder]] = {
    "phi3": Phi3,
    "gemma3": Gemma3,
    "olmo2": Olmo2,
    "cohere": Cohere,
    "stablelm": StableLm,
    "glm4": Glm4,
    "gpt2": Gpt2,
    "gpt_neox": GptNeoX,
    "gpt_bigcode": GptBigCode,
    "bloom": Bloom,
    "falcon": Falcon,
    "opt": Opt,
}
Results = dict[str, torch.Tensor]


def compute(communicator: Communicator, folder: Path) -> Results:
    """Return each model's logits of all tokens."""
    torch.set_num_threads(1)
    return {name: logits(folder / name, made, communicator) for name, made in ARCHITECTURES.items()}


@torch.inference_mode()
def logits(folder: Path, architecture: type[Decoder], communicator: Communicator) -> torch.Tensor:
    """Return the logits [T, V] of prompts prefilled side by side."""
    facts = read_facts(folder)
    config = architecture.config(JsonConfigReader(facts.config))
    weights = architecture.weight_map(config, "safetensors")
    groups = architecture.attention_groups(config)
    envs = {group.name: environment(group, communicator) for group in groups}
    layers = {i: LayerAttention(g.name, TorchSdpaBackend, envs[g.name]) for g in groups for i in g.layers}
    model = architecture.build(config, LayerBuilder(build_plan(communicator, layers)))
    load_weights(model, open_tensors(facts), weights)
    cache_groups = tuple(CacheGroup(g.name, g.layers, (envs[g.name].spec,) * len(g.layers)) for g in groups)
    caches = allocate_cache(CachePlan(cache_groups, BLOCK, 33, 0, 64), CPU)
    step = prefill_step([len(prompt) for prompt in PROMPTS], BLOCK)
    metadata = {name: TorchSdpaBackend.metadata_builder(env).build(step) for name, env in envs.items()}
    context = StepContext(caches, metadata, dict.fromkeys(envs, step.slots))
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    rows: torch.Tensor = model.logits(model(model.embed(ids), step.positions, context))  # type: ignore[operator]
    return rows


def alone(folder: Path) -> Results:
    """Return what one rank computes."""
    return compute(SingleCommunicator(), folder)


def run_rank(rank: int, size: int, port: int, folder: str) -> None:
    """Be one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        torch.save(compute(TorchCommunicator(), Path(folder)), Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
