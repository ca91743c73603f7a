"""Layers built as the engine builds them, from the project's own plugins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from jackfield.checkpoint import JsonConfigReader
from jackfield.interfaces import (
    OPS,
    ROUTING_OPS,
    AttentionEnv,
    AttentionGroup,
    AttentionRequest,
    AttentionStep,
    Communicator,
    LayerInfo,
    LinearScheme,
    OpRequest,
    OutputShard,
    Parallel,
    RankInfo,
    Settings,
    WeightMap,
)
from jackfield.kv_cache import CacheGroup, CachePlan
from jackfield.layers.builder import BuildPlan, LayerAttention, LayerBuilder
from jackfield.layers.parameters import LoadableModule
from jackfield.loader.weights import finalize, loadable_modules
from jackfield.worker.context import StepContext
from jackfield.worker.storage import allocate_cache
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_models.decoder_model import DecoderModel
from jackfield_models.llama import Llama, LlamaConfig, Qwen3
from jackfield_moe.torch_experts import TorchExperts
from jackfield_ops.torch_ops import TorchOps
from jackfield_quantization.unquantized import Unquantized

CPU = torch.device("cpu")
BLOCK = 4
Weights = Mapping[str, torch.Tensor]

TINY = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def plain(info: LayerInfo) -> LinearScheme:
    """Return the dense scheme."""
    return Unquantized.scheme(info, None)


def build_plan(communicator: Communicator, attention: Mapping[int, LayerAttention] | None = None) -> BuildPlan:
    """Return a plan with the reference of everything."""
    return BuildPlan(
        dtype=torch.float32,
        device=CPU,
        communicator=communicator,
        scheme=lambda info: None,
        plain=plain,
        attention=attention or {},
        ops={op: TorchOps.build(op, OpRequest(), Settings()) for op in (*OPS, *ROUTING_OPS)},
        experts=TorchExperts,
    )


def layer_info(
    shards: tuple[OutputShard, ...], inputs: int, parallel: Parallel, rank: RankInfo, **values: Any
) -> LayerInfo:
    """Return the facts of one layer."""
    return replace(LayerInfo("layer", inputs, shards, parallel, rank=rank), **values)


def fill(module: LoadableModule, tensors: Weights) -> None:
    """Load tensors named ``SHARD.SUFFIX`` or ``SUFFIX``, and finish the module."""
    for name, tensor in tensors.items():
        shard, _, suffix = name.rpartition(".")
        assert module.load(shard, suffix, tensor), f"nothing took {name}"
    assert module.unfilled() == []
    module.finalize()


def random_weights(config: LlamaConfig, architecture: type[Llama], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a whole checkpoint by name, from a one-rank model's shapes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q": config.num_heads * config.head_size, "gate": config.intermediate_size}
    sizes |= {"k": config.num_kv_heads * config.head_size, "up": config.intermediate_size}
    sizes["v"] = sizes["k"]
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in architecture.weight_map(config, "safetensors").rules:
        last = rule.target.rpartition(".")[2]
        width = config.hidden_size
        if last in ("embed", "head"):
            shapes[f"{rule.source}.weight"] = (config.vocab_size, width)
        elif last.endswith("norm"):
            shapes[f"{rule.source}.weight"] = (config.head_size if last[0] in "qk" else width,)
        elif rule.shard:
            shapes[f"{rule.source}.weight"] = (sizes[rule.shard], width)
            if last == "qkv" and config.qkv_bias:
                shapes[f"{rule.source}.bias"] = (sizes[rule.shard],)
        else:
            shapes[f"{rule.source}.weight"] = (width, sizes["q"] if last == "o" else sizes["gate"])
            if config.output_bias and last == "o":
                shapes[f"{rule.source}.bias"] = (width,)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def load(model: torch.nn.Module, tensors: Weights, weights: WeightMap) -> None:
    """Fill a model from tensors in memory."""
    modules = loadable_modules(model)
    for rule in weights.rules:
        for suffix in ("weight", "bias"):
            if f"{rule.source}.{suffix}" in tensors:
                assert modules[rule.target].load(rule.shard, suffix, tensors[f"{rule.source}.{suffix}"])
    assert [name for module in modules.values() for name in module.unfilled()] == []
    finalize(model)


def llama_config(architecture: type[Llama] = Llama, **values: object) -> LlamaConfig:
    """Return the configuration of a tiny model."""
    config = architecture.config(JsonConfigReader({**TINY, **values}))
    assert isinstance(config, LlamaConfig)
    return config


class TinyModel:
    """A Llama on one rank, its cache, and a way to run prompts through it.

    Args:
        config: of the model. tensors: the whole checkpoint. communicator: of this rank.
    """

    block_size = BLOCK

    def __init__(
        self, config: LlamaConfig, tensors: Weights, communicator: Communicator, architecture: type[Llama] = Llama
    ) -> None:
        (group,) = architecture.attention_groups(config)
        self.env = environment(group, communicator)
        choice = LayerAttention("full", TorchSdpaBackend, self.env)
        plan = build_plan(communicator, dict.fromkeys(group.layers, choice))
        model = architecture.build(config, LayerBuilder(plan))
        assert isinstance(model, DecoderModel)
        self.model = model
        load(model, tensors, architecture.weight_map(config, "safetensors"))
        cache_group = CacheGroup("full", group.layers, (self.env.spec,) * len(group.layers))
        self.caches = allocate_cache(CachePlan((cache_group,), self.block_size, 33, 0, 64), CPU)

    @torch.inference_mode()
    def run(self, prompts: list[list[int]]) -> torch.Tensor:
        """Return the logits of every token [T, V] of prompts prefilled side by side."""
        step = prefill_step([len(p) for p in prompts], self.block_size)
        metadata = TorchSdpaBackend.metadata_builder(self.env).build(step)
        context = StepContext(self.caches, {"full": metadata}, {"full": step.slots})
        ids = torch.tensor([token for prompt in prompts for token in prompt])
        return self.model.logits(self.model.forward(self.model.embed(ids), step.positions, context))


def prefill_step(lengths: list[int], block_size: int) -> AttentionStep:
    """Return a step of whole prompts; blocks are given out one after another, from page 1 on."""
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    table = np.zeros((len(lengths), -(-max(lengths) // block_size)), dtype=np.int32)
    page = 1
    slots = []
    for row, length in enumerate(lengths):
        blocks = -(-length // block_size)
        table[row, :blocks] = np.arange(page, page + blocks)
        slots += [int(table[row, p // block_size]) * block_size + p % block_size for p in range(length)]
        page += blocks
    positions = np.concatenate([np.arange(length) for length in lengths])
    host = np.array(lengths, dtype=np.int32)
    return AttentionStep(
        num_tokens=int(starts[-1]),
        num_sequences=len(lengths),
        num_decodes=int((host == 1).sum()),
        max_query=max(lengths),
        max_length=max(lengths),
        query_start=torch.from_numpy(starts),
        lengths=torch.from_numpy(host),
        block_table=torch.from_numpy(table),
        slots=torch.tensor(slots),
        positions=torch.from_numpy(positions),
        query_start_host=starts,
        lengths_host=host,
    )


__all__ = [
    "CPU",
    "Llama",
    "Qwen3",
    "TinyModel",
    "build_plan",
    "fill",
    "layer_info",
    "llama_config",
    "load",
    "plain",
    "random_weights",
]


def environment(group: AttentionGroup, communicator: Communicator) -> AttentionEnv:
    """Return what the backend of a group is built with."""
    request = AttentionRequest(
        kind=group.kind,
        needs=group.features,
        dtype="float32",
        layers=group.layers,
        num_heads=group.num_heads,
        num_kv_heads=group.num_kv_heads,
        head_size=group.head_size,
        value_head_size=group.value_head_size,
        scale=group.scale,
        window=group.window,
        softcap=group.softcap,
        rank=RankInfo(communicator.rank, communicator.size),
    )
    return AttentionEnv(request, TorchSdpaBackend.cache_specs(request)[0], BLOCK, CPU)
