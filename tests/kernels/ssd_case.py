"""Mamba-2 layers of usual sizes, computed in pieces by any backend with states. Legend as in ``state_cases``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jackfield.interfaces import AttentionEnv, AttentionRequest, DeviceFacts, OutputShard, StepLimits
from jackfield.testing.attention_cases import empty_plane, settings_of
from jackfield.testing.state_cases import Piece, make_step, schedule

WIDTH = 4
"""Of the short convolution."""
BOUND = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Of relative errors; narrow types round outputs, and what products read."""


@dataclass(frozen=True)
class Ssd:
    """Sizes of a layer. ``lengths`` of sequences; ``cut``: tokens of a piece, or 0 for whole sequences; ``limit`` of
    dt; ``rate``: scale of decays.
    """

    heads: int = 4
    groups: int = 1
    keys: int = 128
    values: int = 64
    lengths: tuple[int, ...] = (1, 63, 130)
    cut: int = 0
    dtype: str = "float32"
    limit: tuple[float, float] | None = None
    rate: float = 1.0
    in_place: bool = False

    @property
    def channels(self) -> int:
        """Of the convolution: x, b and c."""
        return self.heads * self.values + 2 * self.groups * self.keys

    def request(self, device: torch.device) -> AttentionRequest:
        """Return what a backend is asked for."""
        facts = DeviceFacts(device.type)
        if device.type == "cuda":
            facts = DeviceFacts("cuda", capability=torch.cuda.get_device_capability(device))
        extra: dict[str, Any] = {"conv_shards": (OutputShard("", self.channels),), "conv_width": WIDTH}
        return AttentionRequest(
            kind="mamba2",
            dtype=self.dtype,
            device=None if device.type == "cpu" else facts,
            num_heads=self.heads,
            num_kv_heads=self.groups,
            head_size=self.keys,
            value_head_size=self.values,
            extra=extra | ({"dt_limit": self.limit} if self.limit else {}),
        )

    def whole(self) -> Ssd:
        """Return the same in float32 and in one piece."""
        return replace(self, dtype="float32", cut=0)


@dataclass(frozen=True)
class Drawn:
    """For each sequence: ``rows`` [L, C] that are convolved or split into x, b and c, and ``dt`` [L, H]; of ``dtype``.
    ``constants`` and the ``weight`` and ``bias`` of the convolution.
    """

    rows: list[torch.Tensor]
    dt: list[torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor

    def wide(self) -> Drawn:
        """Return the same numbers in float32."""
        rows, dt = ([one.float() for one in several] for several in (self.rows, self.dt))
        return Drawn(rows, dt, self.constants, self.weight.float(), self.bias.float())


def draw(shape: Ssd, seed: int = 0) -> Drawn:
    """Return random inputs; steps are small and large, decays from nearly none to nearly all."""
    generator, kind = torch.Generator().manual_seed(seed), getattr(torch, shape.dtype)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    heads = shape.heads
    constants = {"a": -shape.rate * normal(heads).exp(), "d": normal(heads), "dt_bias": 3 * normal(heads) - 2}
    rows = [normal(length, shape.channels).to(kind) for length in shape.lengths]
    dt = [normal(length, heads).to(kind) for length in shape.lengths]
    return Drawn(rows, dt, constants, normal(shape.channels, WIDTH).to(kind), normal(shape.channels).to(kind))


@dataclass(frozen=True)
class Done:
    """Outputs [L, ...] of each sequence, and of each what the layer left: float32 on the CPU."""

    outputs: list[torch.Tensor]
    left: list[torch.Tensor]


Work = Callable[[Any, Any, Any, list[torch.Tensor], list[torch.Tensor]], torch.Tensor]


def mixed(backend: Any, shape: Ssd, drawn: Drawn, device: torch.device) -> Done:
    """Return what ``mix`` makes, and the last states."""
    constants = {name: value.to(device) for name, value in drawn.constants.items()}
    sizes = [shape.heads * shape.values, shape.groups * shape.keys, shape.groups * shape.keys]

    def work(layer: Any, planes: Any, metadata: Any, rows: list[torch.Tensor], dt: list[torch.Tensor]) -> torch.Tensor:
        # Parts of wider rows, as layers have them.
        x, b, c = torch.cat(rows).split(sizes, 1)
        steps = torch.cat((torch.cat(rows), torch.cat(dt)), 1)[:, shape.channels :]
        b, c = (value.unflatten(1, (shape.groups, shape.keys)) for value in (b, c))
        x = x.unflatten(1, (shape.heads, shape.values))
        out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=device)
        layer.mix({"x": x, "dt": steps, "b": b, "c": c, **constants}, planes, metadata, out)
        return out

    return _run(backend, shape, drawn, device, "state", work)


def convolved(backend: Any, shape: Ssd, drawn: Drawn, device: torch.device) -> Done:
    """Return what ``convolve`` makes, and what it keeps of the last tokens."""

    def work(layer: Any, planes: Any, metadata: Any, rows: list[torch.Tensor], dt: list[torch.Tensor]) -> torch.Tensor:
        x = torch.cat(rows)
        out = torch.full_like(x, float("nan"))
        layer.convolve(x, drawn.weight.to(device), drawn.bias.to(device), planes, metadata, out)
        return out

    return _run(backend, shape, drawn, device, "conv", work)


def _run(backend: Any, shape: Ssd, drawn: Drawn, device: torch.device, plane: str, work: Work) -> Done:
    request = shape.request(device)
    env = AttentionEnv(request, backend.cache_specs(request)[0], 16, device, settings_of(backend))
    layer, builder = backend.layer(env, 0), backend.metadata_builder(env)
    pages, free = [-1] * len(shape.lengths), iter(range(1, 1000))
    planes = {one.name: empty_plane(one, 300, 1, device) for one in env.spec.planes}
    outputs: list[list[torch.Tensor]] = [[] for _ in shape.lengths]
    cuts = [range(shape.cut, length, shape.cut) if shape.cut else () for length in shape.lengths]
    for pieces in schedule(shape.lengths, cuts):
        moves = [(page, page if shape.in_place and page >= 0 else next(free)) for page in pages]
        step = make_step(pieces, moves, device)
        builder.allocate(StepLimits(step.num_tokens, step.num_sequences, 1, step.max_length))
        rows, dt = (_parts(values, pieces, device) for values in (drawn.rows, drawn.dt))
        out = work(layer, planes, builder.build(step), rows, dt)
        for piece, part in zip(pieces, out.split([len(one) for one in rows]), strict=True):
            outputs[piece.sequence].append(part.float().cpu())
            pages[piece.sequence] = moves[piece.sequence][1]
    return Done([torch.cat(parts) for parts in outputs], [planes[plane][page].float().cpu() for page in pages])


def _parts(values: Sequence[torch.Tensor], pieces: Sequence[Piece], device: torch.device) -> list[torch.Tensor]:
    return [values[piece.sequence][piece.start : piece.stop].to(device) for piece in pieces]


def worst(found: Done, wanted: Done) -> float:
    """Return the largest relative error of an output or of what is left of a sequence."""
    pairs = [*zip(found.outputs, wanted.outputs, strict=True), *zip(found.left, wanted.left, strict=True)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


SHAPES = {
    "state 128": Ssd(),
    "state 64, heads of 128, groups": Ssd(groups=2, keys=64, values=128, lengths=(65, 2, 200)),
    "state 16, three heads of a group": Ssd(heads=6, groups=2, keys=16, lengths=(129, 64, 1, 7)),
    "state 256": Ssd(heads=2, keys=256, lengths=(70, 3)),
    "odd sizes": Ssd(heads=3, groups=3, keys=24, values=40, lengths=(1, 100, 31)),
    "many heads": Ssd(heads=19, keys=16, values=16, lengths=(90, 5)),
    "limits": Ssd(groups=4, keys=16, lengths=(1, 70), limit=(0.01, 0.5)),
    "all is forgotten": Ssd(keys=64, lengths=(140, 20), rate=300.0),
    "in place": Ssd(keys=16, lengths=(100, 40, 5), cut=33, in_place=True),
    "cut after 7": Ssd(groups=2, keys=64, lengths=(30, 21, 8), cut=7, in_place=True),
    "cut after 64": Ssd(groups=2, keys=64, lengths=(200, 128, 65), cut=64),
    "token by token": Ssd(keys=16, lengths=(12, 5), cut=1),
    "pairs": Ssd(keys=16, values=16, lengths=(9, 4, 3), cut=2, in_place=True),
}
