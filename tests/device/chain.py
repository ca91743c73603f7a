"""The kernels of a decode step, one after another, with random weights. Legend: B sequences (and tokens), E width, F
intermediate, H query heads, K cache heads, D head size, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from op_checks import draw
from paged_case import Case, Shape, limits_of, make_case

from jackfield.interfaces import LayerInfo, OpRequest, OutputShard, Parallel, PendingNorm
from jackfield.interfaces.plugin import Settings
from jackfield.layers.activation import GatedActivation
from jackfield.layers.norm import RmsNorm
from jackfield_attention.triton_backend import TritonBackend
from jackfield_ops.triton_ops import TritonOps
from jackfield_quantization.triton_dense_scheme import SkinnyScheme

EPS = 1e-6
OPS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul")


@dataclass(frozen=True)
class Sizes:
    """Of a model, and how many positions its sequences may differ by."""

    layers: int = 4
    width: int = 1024
    intermediate: int = 3072
    span: int = 100


class Linear:
    """A dense weight of the width of its inputs, and its scheme."""

    def __init__(self, outputs: int, inputs: int, like: torch.Tensor, seed: int, pdl: bool) -> None:
        self.info = LayerInfo("x", inputs, (OutputShard("", outputs),), Parallel.REPLICATED, dtype="bfloat16")
        weight = draw(outputs, inputs, dtype=torch.float32, seed=seed) / math.sqrt(inputs)
        self.weight = weight.to(like.dtype).to(like.device)
        self.scheme = SkinnyScheme(pdl)
        self.scheme.finalize(self)

    def get_parameter(self, target: str) -> torch.Tensor:
        assert target == "weight"
        return self.weight

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def takes_narrow(self, rows: int) -> bool:
        return False

    def folds(self, op: str, rows: int) -> bool:
        return op in self.scheme.folded_ops(self.info, rows)

    def gated(self, x: torch.Tensor | PendingNorm, op: str) -> torch.Tensor:
        return self.scheme.apply_folded(self, x, None, op)

    def __call__(self, x: torch.Tensor | PendingNorm) -> torch.Tensor:
        """Return the product."""
        if isinstance(x, PendingNorm):
            return self.scheme.apply_folded(self, x, None)
        return self.scheme.apply(self, x, None)


class Block:
    """One layer: norm, qkv, norm and rotation and cache write, attention, o, norm, gate and up, activation, down.
    ``fold``: norms and activations are folded into products where the scheme does that.
    """

    def __init__(self, case: Case, sizes: Sizes, seed: int, pdl: bool, fold: bool) -> None:
        shape, like = case.shape, case.qkv
        heads, kv_heads, size = shape.heads, shape.kv_heads, shape.size
        settings = Settings({"pdl": pdl})
        ops = {name: _op(name, case, settings) for name in OPS}
        self.attention: Any = TritonBackend.layer(replace(case.env, settings=settings), 0)
        self.cache = {name: plane.clone() for name, plane in case.cache.items()}
        rows = [(heads + 2 * kv_heads) * size, sizes.width, 2 * sizes.intermediate, sizes.width]
        columns = [sizes.width, heads * size, sizes.width, sizes.intermediate]
        self.qkv, self.o, self.up, self.down = (
            Linear(o, i, like, 10 * seed + n, pdl) for n, (o, i) in enumerate(zip(rows, columns, strict=True))
        )
        self.of_head = 1 + draw(size, dtype=like.dtype, device=shape.device) / 8
        self.activation = GatedActivation("silu", ops, frozenset() if fold else frozenset(OPS))
        self.input_norm, self.post_norm = (
            RmsNorm("norm", sizes.width, EPS, ops, like.dtype, like.device, foldable=fold) for _ in range(2)
        )
        for norm, fed in ((self.input_norm, self.qkv), (self.post_norm, self.up)):
            norm.weight.data.copy_(1 + draw(sizes.width, dtype=like.dtype, device=shape.device) / 8)
            norm.feed(fed)

    def __call__(
        self, x_BE: torch.Tensor, residual_BE: torch.Tensor, angles: torch.Tensor, metadata: Any, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer adds, and the residual before it."""
        x_BE, residual_BE = self.input_norm.add(x_BE, residual_BE)
        qkv = self.qkv(x_BE)
        self.attention.prepare(qkv, angles, self.of_head, self.of_head, EPS, self.cache, slots)
        heads, size = self.attention.heads, self.attention.size
        q_BHD = qkv[:, : heads * size].view(-1, heads, size)
        mixed = q_BHD.new_empty(q_BHD.shape)
        self.attention.attend(q_BHD, self.cache, metadata, mixed)
        x_BE, residual_BE = self.post_norm.add(self.o(mixed.flatten(1)), residual_BE)
        return self.down(self.activation.of(self.up, x_BE)), residual_BE


def _op(name: str, case: Case, settings: Settings) -> Callable[..., Any]:
    return TritonOps.build(name, OpRequest(kind=name, device=case.env.request.device), settings)


class Chain:
    """All layers, and the tensors that a recorded graph reads and writes."""

    def __init__(self, shape: Shape, sizes: Sizes, pdl: bool, fold: bool = True) -> None:
        self.case = make_case(TritonBackend, shape)
        self.sizes = sizes
        builder = TritonBackend.metadata_builder(self.case.env)
        builder.allocate(limits_of(self.case))
        self.metadata: Any = builder.build(self.case.step)
        self.blocks = [Block(self.case, sizes, seed, pdl, fold) for seed in range(sizes.layers)]
        like, count = self.case.qkv, len(shape.counts)
        self.x, self.residual, self.out = (like.new_zeros(count, sizes.width) for _ in range(3))
        self.angles = torch.zeros(count, shape.size, device=like.device)
        self.longest = self.case.step.lengths.clone()

    def set_step(self, number: int) -> None:
        """Make everything that differs from step to step what it is in step ``number``."""
        case, step = self.case, self.case.step
        generator = torch.Generator().manual_seed(number)
        for target in (self.x, self.residual):
            target.copy_(torch.randn(target.shape, generator=generator))
        turns = torch.rand(len(self.x), case.shape.size // 2, generator=generator) * 6
        self.angles.copy_(torch.cat((turns.cos(), turns.sin()), 1))
        step.lengths.copy_(self.longest - number % self.sizes.span)
        last = (step.lengths - 1).long()[:, None]
        pages = step.block_table.long().gather(1, last // case.shape.block)
        step.slots.copy_((pages * case.shape.block + last % case.shape.block)[:, 0])

    def run(self) -> None:
        """Launch every kernel."""
        x, residual = self.x, self.residual
        for block in self.blocks:
            x, residual = block(x, residual, self.angles, self.metadata, self.case.step.slots)
        self.out.copy_(x + residual)

    def planes(self) -> list[torch.Tensor]:
        """Return all caches, with a number where nothing was written."""
        return [plane.nan_to_num(9.0) for block in self.blocks for plane in block.cache.values()]
