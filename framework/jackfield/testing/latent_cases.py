"""Multi-head latent attention and encoders by their definitions, in float64.

Legend: T tokens, L tokens of a sequence, H heads, K features without and P with rotation, R latent, V value size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from jackfield.interfaces import (
    AttentionEnv,
    AttentionRequest,
    CacheSpec,
    LayerInfo,
    LinearScheme,
    OutputShard,
    Parallel,
    StepLimits,
)
from jackfield.testing.attention_cases import SPARE, Query, empty_plane, make_step, settings_of, spec_for


class DenseScheme(LinearScheme):
    """A dense weight; the least that a backend may ask of a layer that it is bound to."""

    def dequantize(self, layer: Any) -> torch.Tensor:
        """See LinearScheme."""
        found: torch.Tensor = layer.get_parameter("weight")
        return found


class DenseLayer:
    """A dense COLUMN layer."""

    def __init__(self, weight_OI: torch.Tensor, unit: int) -> None:
        outputs, inputs = weight_OI.shape
        dtype = str(weight_OI.dtype).removeprefix("torch.")
        self.info = LayerInfo("kv_up", inputs, (OutputShard("", outputs, unit),), Parallel.COLUMN, dtype=dtype)
        self.scheme = DenseScheme()
        self._weight = weight_OI

    def get_parameter(self, target: str) -> torch.Tensor:
        """Return the weight."""
        assert target == "weight"
        return self._weight

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Nobody who is bound to a layer may change it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of a request of kind ``mla``."""

    heads: int
    plain: int
    rope: int
    latent: int
    value: int

    @classmethod
    def of(cls, request: AttentionRequest) -> LatentSizes:
        """Read them from the request."""
        latent, rope = int(request.extra["latent_size"]), int(request.extra["rope_size"])
        return cls(request.num_heads, request.head_size - rope, rope, latent, request.value_head_size)


def latent_attention(
    backend: Any, request: AttentionRequest, queries: Sequence[Query], device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a backend computes for a step and what the definition says, [T, H, V] each in float64."""
    block, size, generator = 4, LatentSizes.of(request), torch.Generator().manual_seed(seed)
    spec = spec_for(backend, request, block)
    assert spec is not None, f"no layout for blocks of {block}"
    ordered = sorted(queries, key=lambda q: q.new != 1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    pages = sum(-(-(q.new + q.old) // block) for q in ordered)
    order = np.random.default_rng(seed).permutation(np.arange(1, pages + SPARE, dtype=np.int32))
    step = make_step(ordered, block, order, device=device)
    cache = {plane.name: empty_plane(plane, pages + SPARE, block, device) for plane in spec.planes}
    weight = draw(size.heads * (size.plain + size.value), size.latent) * 0.3
    rows = [(draw(q.new + q.old, size.latent), draw(q.new + q.old, size.rope)) for q in ordered]
    q_THD = draw(step.num_tokens, size.heads, request.head_size)
    layer = backend.layer(env := AttentionEnv(request, spec, block, device, settings_of(backend)), 0)
    layer.bind(DenseLayer(weight, size.plain + size.value))
    for index, query in enumerate(ordered):
        places = torch.arange(query.old)
        slots = step.block_table[index].cpu()[places // block].long() * block + places % block
        if query.old:
            layer.write(rows[index][0][: query.old], rows[index][1][: query.old], cache, slots.to(device))
    layer.write(
        *(torch.cat([r[i][q.old :] for r, q in zip(rows, ordered, strict=True)]) for i in (0, 1)), cache, step.slots
    )
    builder = backend.metadata_builder(env)
    builder.allocate(StepLimits(step.num_tokens, step.num_sequences, step.block_table.shape[1], step.max_length))
    out = torch.full((step.num_tokens, size.heads, size.value), float("nan"), device=device)
    layer.attend(q_THD, cache, builder.build(step), out)
    return out.double(), _latent_reference(request, size, weight, rows, q_THD, ordered)


def _latent_reference(
    request: AttentionRequest,
    size: LatentSizes,
    weight: torch.Tensor,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    q_THD: torch.Tensor,
    queries: Sequence[Query],
) -> torch.Tensor:
    expand_HJR = weight.double().view(size.heads, size.plain + size.value, size.latent)
    found, at = [], 0
    for (latent_LR, rope_LP), query in zip(rows, queries, strict=True):
        both_LHJ = torch.einsum("lr,hjr->lhj", latent_LR.double(), expand_HJR)
        k_LHK, v_LHV = torch.split(both_LHJ, [size.plain, size.value], -1)
        k_LHD = torch.cat((k_LHK, rope_LP.double().unsqueeze(1).expand(-1, size.heads, -1)), -1)
        for place in range(query.new):
            seen = query.old + place + 1
            scores_HL = torch.einsum("hd,lhd->hl", q_THD[at].double(), k_LHD[:seen]) * request.scale
            found.append(torch.einsum("hl,lhv->hv", scores_HL.softmax(-1), v_LHV[:seen]))
            at += 1
    return torch.stack(found)


def encoder_attention(
    backend: Any, request: AttentionRequest, lengths: Sequence[int], device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a backend computes for whole sequences that see themselves, and the definition, [T, H, V] each. A
    window counts to both sides, the token itself included.
    """
    generator = torch.Generator().manual_seed(seed)
    ordered = sorted(lengths, key=lambda length: length != 1)
    pages = np.arange(1, sum(ordered) + 1, dtype=np.int32)
    step = replace(make_step([Query(n) for n in ordered], 16, pages, device=device), causal=False)

    def draw(heads: int, size: int) -> torch.Tensor:
        return torch.randn(step.num_tokens, heads, size, generator=generator).to(device)

    q, k = draw(request.num_heads, request.head_size), draw(request.num_kv_heads, request.head_size)
    v = draw(request.num_kv_heads, request.value_head_size)
    spec = next(iter(backend.cache_specs(request)))
    assert spec == CacheSpec(()), "an encoder layer keeps nothing"
    env = AttentionEnv(request, spec, 16, device, settings_of(backend))
    builder = backend.metadata_builder(env)
    builder.allocate(StepLimits(step.num_tokens, step.num_sequences, 4, step.max_length))
    out = torch.full((step.num_tokens, request.num_heads, request.value_head_size), float("nan"), device=device)
    backend.layer(env, 0).attend_fresh(q, k, v, builder.build(step), out)
    return out.double(), _encoder_reference(request, ordered, q.double(), k.double(), v.double())


def _encoder_reference(
    request: AttentionRequest, lengths: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    rows, start, ratio = [], 0, request.num_heads // request.num_kv_heads
    for length in lengths:
        for token in range(start, start + length):
            reach = length if request.window is None else request.window - 1
            seen = slice(max(start, token - reach), min(start + length, token + reach + 1))
            for head in range(request.num_heads):
                weights = (k[seen, head // ratio] @ q[token, head] * request.scale).softmax(0)
                rows.append(weights @ v[seen, head // ratio])
        start += length
    return torch.stack(rows).view(start, request.num_heads, -1)
