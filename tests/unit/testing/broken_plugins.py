"""Small right plugins of this process, and ways to break them: the kit must tell the ones from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from jackfield.interfaces import (
    BLOCK,
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    CacheSpec,
    DraftBatch,
    Drafter,
    DrafterEnv,
    Drafts,
    HostLengths,
    LayerInfo,
    LinearScheme,
    ParameterSpec,
    PendingNorm,
    Plane,
    QuantizationMethod,
    Reason,
    RequestView,
    SchedulingPolicy,
    Settings,
)
from jackfield.layers.functional import REFERENCES, settled


class Builder:
    """Hands the step on."""

    host_lengths = HostLengths.EXACT

    def allocate(self, limits: Any) -> None:
        """Nothing to keep."""

    def build(self, step: Any) -> Any:
        """Return the step."""
        return step


class Layer:
    """Attention, one sequence after another; ``fault`` names what is wrong with it."""

    def __init__(self, env: AttentionEnv, fault: str) -> None:
        self.env, self.fault = env, fault

    def write(self, k_TKD: Any, v_TKD: Any, cache: Any, slots: Any) -> None:
        """Store keys and values."""
        size, keep = self.env.block_size, slots >= 0
        if self.fault == "writes where it must not":
            slots, keep = slots.abs(), keep | True
        for name, new in (("k", k_TKD), ("v", v_TKD)):
            cache[name][slots[keep] // size, slots[keep] % size] = new[keep]
            if self.fault == "touches a neighbour":
                cache[name][slots[keep] // size, (slots[keep] + 1) % size] = new[keep]

    def attend(self, q_THD: Any, cache: Any, step: Any, out_THD: Any) -> None:
        """Attend."""
        for row, length in enumerate(step.lengths_host.tolist()):
            first, last = step.query_start_host[row : row + 2].tolist()
            pages = step.block_table[row, : -(-length // self.env.block_size)]
            k, v = (cache[name][pages].flatten(0, 1)[:length].transpose(0, 1) for name in "kv")
            shift = 1 if self.fault == "sees the next token" else 0
            mask = torch.ones(last - first, length, dtype=torch.bool).tril(length - last + first + shift)
            if self.fault == "forgets what was kept":
                mask[:, : length - last + first] = False
            scale = 1.0 if self.fault == "ignores the scale" else self.env.request.scale
            q = q_THD[first:last].transpose(0, 1)
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale, enable_gqa=True)
            out_THD[first:last] = out[0].transpose(0, 1)


class Attention(AttentionBackend):
    """A right backend over blocks with tokens outside heads."""

    name = "kit_attention"
    summary = "for tests of the kit"
    kinds: ClassVar[frozenset[str]] = frozenset({"full"})
    features: ClassVar[frozenset[str]] = frozenset({"prefill", "chunked_prefill", "decode", "mixed", "gqa"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32"})
    fault: ClassVar[str] = ""

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """Refuse caches of other types."""
        return [] if request.cache_dtype in ("", request.dtype) else [Reason("cache_dtype", "cache_dtype", "no")]

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return the one layout."""
        shape = (BLOCK, request.local_kv_heads, request.head_size)
        return [CacheSpec(tuple(Plane(name, request.dtype, shape, shard_dim=1) for name in "kv"))]

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> Any:
        """Return the builder."""
        return Builder()

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> Layer:
        """Return the layer."""
        return Layer(env, cls.fault)


class Scheme(LinearScheme):
    """Dense weights; ``fault`` names what is wrong."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return one weight."""
        shape = (sum(info.local_output_sizes), info.local_input_size)
        spec = ParameterSpec("weight", "weight", shape, info.dtype)
        twice = ParameterSpec("other", "weight", shape, info.dtype)
        return [spec, twice] if self.fault == "loads it twice" else [spec]

    def finalize(self, layer: Any) -> None:
        """Break the weight, if that is the fault."""
        if self.fault == "rolls rows":
            weight = layer.get_parameter("weight")
            layer.replace_parameters({"weight": weight.roll(1, 0)})

    def apply(self, layer: Any, x_TI: Any, bias_O: Any, out_TO: Any = None) -> torch.Tensor:
        """Multiply."""
        weight = layer.get_parameter("weight")
        found = F.linear(x_TI, weight * (1.05 if self.fault == "scales products" else 1), bias_O)
        if out_TO is None or self.fault == "ignores out":
            return found
        return out_TO.copy_(found)  # type: ignore[no-any-return]

    def folded_ops(self, info: LayerInfo, rows: int) -> frozenset[str]:
        """Return what surrounds a product of few rows."""
        names = {"rms_norm", "fused_add_rms_norm", "silu_and_mul"} if rows < 4 else set()
        return frozenset(names | {"rotary"} if self.fault == "folds what is not beside it" else names)

    def apply_folded(self, layer: Any, x_TI: Any, bias_O: Any, gate: str = "") -> torch.Tensor:
        """Do one after the other."""
        if isinstance(x_TI, PendingNorm) and x_TI.total is not None and x_TI.residual is not None:
            x_TI.total.copy_(x_TI.x + (0 if self.fault == "leaves another sum" else x_TI.residual))
        rows = x_TI.x if self.fault == "forgets the norm" and isinstance(x_TI, PendingNorm) else settled(x_TI)
        found = self.apply(layer, rows, bias_O)
        turned = found.roll(found.shape[1] // 2, 1) if self.fault == "swaps the gate" else found
        return REFERENCES[gate](turned) if gate else found  # type: ignore[no-any-return]

    def lookup(self, layer: Any, ids_T: torch.Tensor) -> torch.Tensor:
        """Look rows up."""
        found: torch.Tensor = layer.get_parameter("weight")[ids_T]
        return found

    def dequantize(self, layer: Any) -> torch.Tensor:
        """Return the weight."""
        found: torch.Tensor = layer.get_parameter("weight")
        return found


class Method(QuantizationMethod):
    """A right method."""

    name = "kit_method"
    summary = "for tests of the kit"
    kinds: ClassVar[frozenset[str]] = frozenset({""})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32"})
    fault: ClassVar[str] = ""

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme | None:
        """Return a scheme."""
        return None if cls.fault == "takes nothing" else Scheme(cls.fault)


class Repeat(Drafter):
    """Proposes the last token again."""

    name = "kit_drafter"
    summary = "for tests of the kit"
    kinds: ClassVar[frozenset[str]] = frozenset({"kit_drafter"})
    fault: ClassVar[str] = ""

    def __init__(self, env: DrafterEnv) -> None:
        self._count = env.request.num_tokens

    @classmethod
    def build(cls, env: DrafterEnv) -> Repeat:
        """Return the drafter."""
        return cls(env)

    def propose(self, batch: DraftBatch) -> Drafts:
        """Propose."""
        assert batch.token_ids is not None
        last = batch.token_ids[batch.slots, batch.lengths - 1]
        ids = torch.as_tensor(last).long().unsqueeze(1).repeat(1, self._count)
        if self.fault == "pads before drafts":
            ids[:, 0] = -1
        if self.fault == "leaves the vocabulary":
            ids[:] = 10**6
        if self.fault == "proposes nothing":
            ids[:] = -1
        return Drafts(ids)


class Order(SchedulingPolicy):
    """Short prompts first."""

    name = "kit_policy"
    summary = "for tests of the kit"
    fault: ClassVar[str] = ""

    @classmethod
    def build(cls, settings: Settings) -> Order:
        """Return the policy."""
        made = cls()
        made.asked = 0
        return made

    asked: int = 0

    def key(self, request: RequestView) -> tuple[float, ...]:
        """Return the key."""
        self.asked += 1
        wrong: Mapping[str, Any] = {
            "counts questions": (float(self.asked),),
            "not a number": (float("nan"),),
            "lengths differ": (1.0,) * (1 + request.prompt_length % 2),
        }
        found: tuple[float, ...] = wrong.get(self.fault, (request.prompt_length, request.arrival))
        return found


def broken(base: type[Any], fault: str) -> type[Any]:
    """Return a plugin with that fault."""
    return type(f"Broken{base.__name__}", (base,), {"fault": fault})
