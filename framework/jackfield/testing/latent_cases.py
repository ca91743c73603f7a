"""Multi-head latent attention and encoders by their definitions, in float64.

Legend: T tokens, L tokens of a sequence, N new ones, H heads, K features without and P with rotation, R latent, V value
size, J index heads, I size of an index key.
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
    """Sizes of a request of kind ``mla`` or ``mla_sparse``."""

    heads: int
    plain: int
    rope: int
    latent: int
    value: int

    @property
    def head(self) -> int:
        """Of a query head."""
        return self.plain + self.rope

    @classmethod
    def of(cls, request: AttentionRequest) -> LatentSizes:
        """Read them from the request."""
        latent, rope = int(request.extra["latent_size"]), int(request.extra["rope_size"])
        return cls(request.num_heads, request.head_size - rope, rope, latent, request.value_head_size)


@dataclass(slots=True)
class Spoken:
    """What was said of one sequence: latents [L, R], rotated keys [L, P], and for kind ``mla_sparse`` index keys
    [L, I]; of its new tokens index queries [N, J, I] and weights [N, J].
    """

    latent: torch.Tensor
    rope: torch.Tensor
    index_key: torch.Tensor
    index_q: torch.Tensor
    index_weight: torch.Tensor


@dataclass(slots=True)
class LatentCase:
    """A step of a layer of kind ``mla`` or ``mla_sparse``, and everything that was said."""

    request: AttentionRequest
    size: LatentSizes
    queries: Sequence[Query]
    weight: torch.Tensor
    said: list[Spoken]
    q_THD: torch.Tensor

    @property
    def sparse(self) -> bool:
        """Whether an indexer chooses what is attended to."""
        return "index_topk" in self.request.extra


def latent_attention(
    backend: Any,
    request: AttentionRequest,
    queries: Sequence[Query],
    device: torch.device,
    seed: int = 0,
    block: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a backend computes for a step and what the definition says, [T, H, V] each in float64; over all
    tokens (kind ``mla``) or those that an indexer chooses (``mla_sparse``). ``block``: tokens of a page.
    """
    case = _draw_case(request, sorted(queries, key=lambda q: q.new != 1), device, seed)
    return _latent_found(backend, case, device, seed, block), _latent_reference(case)


def _draw_case(request: AttentionRequest, queries: Sequence[Query], device: torch.device, seed: int) -> LatentCase:
    size, generator = LatentSizes.of(request), torch.Generator().manual_seed(seed)
    heads, width = int(request.extra.get("index_heads", 0)), int(request.extra.get("index_size", 0))

    def draw(*shape: int, dtype: str = request.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, getattr(torch, dtype))

    weight = draw(size.heads * (size.plain + size.value), size.latent) * 0.3
    said = [
        Spoken(
            draw(q.new + q.old, size.latent),
            draw(q.new + q.old, size.rope),
            draw(q.new + q.old, width),
            draw(q.new, heads, width),
            draw(q.new, heads, dtype="float32"),
        )
        for q in queries
    ]
    return LatentCase(request, size, queries, weight, said, draw(sum(q.new for q in queries), size.heads, size.head))


def _latent_found(backend: Any, case: LatentCase, device: torch.device, seed: int, block: int) -> torch.Tensor:
    request, queries = case.request, case.queries
    spec = spec_for(backend, request, block)
    assert spec is not None, f"no layout for blocks of {block}"
    pages = sum(-(-(q.new + q.old) // block) for q in queries)
    order = np.random.default_rng(seed).permutation(np.arange(1, pages + SPARE, dtype=np.int32))
    step = make_step(queries, block, order, device=device)
    cache = {plane.name: empty_plane(plane, pages + SPARE, block, device) for plane in spec.planes}
    layer = backend.layer(env := AttentionEnv(request, spec, block, device, settings_of(backend)), 0)
    layer.bind(DenseLayer(case.weight, case.size.plain + case.size.value))
    for index, query in enumerate(queries):
        places = torch.arange(query.old)
        slots = step.block_table[index].cpu()[places // block].long() * block + places % block
        if query.old:
            _write(layer, case, [(case.said[index], slice(0, query.old))], cache, slots.to(device))
    new = [(said, slice(q.old, q.old + q.new)) for said, q in zip(case.said, queries, strict=True)]
    _write(layer, case, new, cache, step.slots)
    builder = backend.metadata_builder(env)
    builder.allocate(StepLimits(step.num_tokens, step.num_sequences, step.block_table.shape[1], step.max_length))
    shape = (step.num_tokens, case.size.heads, case.size.value)
    out = torch.full(shape, float("nan"), dtype=case.q_THD.dtype, device=device)
    _attend(layer, case, cache, builder.build(step), out)
    return out.double()


def _write(
    layer: Any,
    case: LatentCase,
    parts: Sequence[tuple[Spoken, slice]],
    cache: Mapping[str, torch.Tensor],
    slots: torch.Tensor,
) -> None:
    layer.write(
        torch.cat([said.latent[p] for said, p in parts]), torch.cat([said.rope[p] for said, p in parts]), cache, slots
    )
    if case.sparse:
        layer.write_index(torch.cat([said.index_key[p] for said, p in parts]), cache, slots)


def _attend(
    layer: Any, case: LatentCase, cache: Mapping[str, torch.Tensor], metadata: Any, out_THV: torch.Tensor
) -> None:
    if not case.sparse:
        layer.attend(case.q_THD, cache, metadata, out_THV)
        return
    q_TJI, weight_TJ = (torch.cat([getattr(s, name) for s in case.said]) for name in ("index_q", "index_weight"))
    chosen = layer.choose(q_TJI, weight_TJ, cache, metadata)
    layer.attend_chosen(case.q_THD, chosen, cache, metadata, out_THV)


def _latent_reference(case: LatentCase) -> torch.Tensor:
    size = case.size
    expand_HJR = case.weight.double().view(size.heads, size.plain + size.value, size.latent)
    found, at = [], 0
    for said, query in zip(case.said, case.queries, strict=True):
        both_LHJ = torch.einsum("lr,hjr->lhj", said.latent.double(), expand_HJR)
        k_LHK, v_LHV = torch.split(both_LHJ, [size.plain, size.value], -1)
        k_LHD = torch.cat((k_LHK, said.rope.double().unsqueeze(1).expand(-1, size.heads, -1)), -1)
        for place in range(query.new):
            seen = _chosen(case, said, place, query)
            scores_HL = torch.einsum("hd,lhd->hl", case.q_THD[at].double(), k_LHD[seen]) * case.request.scale
            found.append(torch.einsum("hl,lhv->hv", scores_HL.softmax(-1), v_LHV[seen]))
            at += 1
    return torch.stack(found)


def _chosen(case: LatentCase, said: Spoken, place: int, query: Query) -> torch.Tensor:
    """Return which tokens of its sequence a new token attends to."""
    seen = query.old + place + 1
    if not case.sparse:
        return torch.tensor(query.path(place), device=case.q_THD.device)
    products_JL = torch.einsum("ji,li->jl", said.index_q[place].double(), said.index_key[:seen].double())
    scores_L = said.index_weight[place].double() @ products_JL.clamp(min=0)
    return scores_L.argsort(descending=True)[: int(case.request.extra["index_topk"])]


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
