"""Layers with a state per sequence: random steps, and each recurrence by its definition, token by token in float64.

Legend: T tokens, B sequences, I channels, N states of a channel, H value heads, G key heads, K key size, V value size,
C channels and W width of the short convolution. Names of inputs by kind, as layers give them to ``mix``:

- ``mamba1`` (arXiv:2312.00752): ``x``, ``dt`` [T, I] (before the softplus), ``b``, ``c`` [T, N]; ``a`` [I, N], ``d``
  [I].
- ``mamba2`` (arXiv:2405.21060): ``x`` [T, H, V], ``dt`` [T, H] (before bias and softplus), ``b``, ``c`` [T, G, N];
  ``a``, ``d``, ``dt_bias`` [H].
- ``linear`` (arXiv:2006.16236, with decay): ``q``, ``k`` [T, G, K], ``v`` [T, H, V]; ``g`` [H], logarithms of decays.
- ``gdn`` (arXiv:2412.06464), ``kda`` (arXiv:2510.26692): ``q``, ``k`` [T, G, K] (brought to length 1 by the layer, and
  q scaled by K^-1/2), ``v`` [T, H, V], ``beta`` [T, H], ``g`` [T, H] or, for ``kda``, [T, H, K].
- ``short_conv``: ``x`` [T, C]; ``weight`` [C, W], ``bias`` [C].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from jackfield.interfaces import AttentionEnv, AttentionStep, StepLimits
from jackfield.testing.attention_cases import empty_plane, settings_of
from jackfield.testing.attention_shapes import STATE_SHAPES, StateShape, state_request

Tensors = Mapping[str, torch.Tensor]
DT_LIMIT = 2.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a layer mixes: ``tokens`` of each sequence [L, ...], and ``constants`` of the layer; float64."""

    sequences: Sequence[Tensors]
    constants: Tensors
    out_shape: tuple[int, ...]


def make_inputs(kind: str, lengths: Sequence[int], seed: int) -> Inputs:
    """Return random inputs; decays go from nearly none to nearly all."""
    shape, generator = STATE_SHAPES[kind], torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    tokens, constants, out_shape = _MAKERS[kind](shape, draw)
    sequences = [{name: draw(length, *size) for name, size in tokens.items()} for length in lengths]
    for sequence in sequences:
        if "beta" in sequence:
            sequence["beta"] = sequence["beta"].sigmoid()
        if "g" in sequence:
            sequence["g"] = -sequence["g"].exp()
    return Inputs(sequences, constants, out_shape)


Draw = Callable[..., torch.Tensor]
Made = tuple[Mapping[str, tuple[int, ...]], Tensors, tuple[int, ...]]


def _mamba1(s: StateShape, draw: Draw) -> Made:
    sizes = {"x": (s.heads,), "dt": (s.heads,), "b": (s.key,), "c": (s.key,)}
    return sizes, {"a": -draw(s.heads, s.key).exp(), "d": draw(s.heads)}, (s.heads,)


def _mamba2(s: StateShape, draw: Draw) -> Made:
    sizes = {"x": (s.heads, s.value), "dt": (s.heads,), "b": (s.groups, s.key), "c": (s.groups, s.key)}
    return sizes, {"a": -draw(s.heads).exp(), "d": draw(s.heads), "dt_bias": draw(s.heads)}, (s.heads, s.value)


def _linear(s: StateShape, draw: Draw) -> Made:
    sizes = {"q": (s.groups, s.key), "k": (s.groups, s.key), "v": (s.heads, s.value)}
    return sizes, {"g": -draw(s.heads).exp()}, (s.heads, s.value)


def _delta(s: StateShape, draw: Draw) -> Made:
    sizes = {
        "q": (s.groups, s.key),
        "k": (s.groups, s.key),
        "v": (s.heads, s.value),
        "beta": (s.heads,),
        "g": (s.heads,),
    }
    return sizes, {}, (s.heads, s.value)


def _kda(s: StateShape, draw: Draw) -> Made:
    sizes, constants, out = _delta(s, draw)
    return {**sizes, "g": (s.heads, s.key)}, constants, out


def _short_conv(s: StateShape, draw: Draw) -> Made:
    return {"x": (s.channels,)}, {"weight": draw(s.channels, s.width), "bias": draw(s.channels)}, (s.channels,)


_MAKERS: Mapping[str, Callable[[StateShape, Draw], Made]] = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "linear": _linear,
    "gdn": _delta,
    "kda": _kda,
    "short_conv": _short_conv,
}


def definition(kind: str, tokens: Tensors, constants: Tensors) -> torch.Tensor:
    """Return the outputs of one whole sequence, [L, ...]."""
    if kind == "short_conv":
        return convolution(tokens["x"], constants["weight"], constants["bias"])
    step = {"mamba1": _mamba1_step, "mamba2": _mamba2_step, "linear": _linear_step}.get(kind, _delta_step)
    state: Any = 0.0
    outputs = []
    for at in range(len(next(iter(tokens.values())))):
        state, out = step({name: value[at] for name, value in tokens.items()}, constants, state)
        outputs.append(out)
    return torch.stack(outputs)


def _mamba1_step(t: Tensors, c: Tensors, state: Any) -> tuple[Any, torch.Tensor]:
    dt_I1 = F.softplus(t["dt"]).unsqueeze(1)
    state = torch.exp(dt_I1 * c["a"]) * state + dt_I1 * t["x"].unsqueeze(1) * t["b"]
    return state, (state * t["c"]).sum(1) + c["d"] * t["x"]


def _mamba2_step(t: Tensors, c: Tensors, state: Any) -> tuple[Any, torch.Tensor]:
    heads = len(t["x"])
    b_HN, c_HN = (t[name].repeat_interleave(heads // len(t[name]), 0) for name in "bc")
    dt_H = F.softplus(t["dt"] + c["dt_bias"]).clamp(0.0, DT_LIMIT)
    new_HNV = torch.einsum("hn,hv->hnv", b_HN, t["x"] * dt_H.unsqueeze(1))
    state = torch.exp(dt_H * c["a"]).view(-1, 1, 1) * state + new_HNV
    return state, torch.einsum("hn,hnv->hv", c_HN, state) + c["d"].unsqueeze(1) * t["x"]


def _linear_step(t: Tensors, c: Tensors, state: Any) -> tuple[Any, torch.Tensor]:
    q_HK, k_HK = (t[name].repeat_interleave(len(t["v"]) // len(t[name]), 0) for name in "qk")
    state = c["g"].exp().view(-1, 1, 1) * state + torch.einsum("hk,hv->hkv", k_HK, t["v"])
    return state, torch.einsum("hk,hkv->hv", q_HK, state)


def _delta_step(t: Tensors, c: Tensors, state: Any) -> tuple[Any, torch.Tensor]:
    heads = len(t["v"])
    units = ((t[name] / t[name].norm(dim=-1, keepdim=True)) for name in "qk")
    q_HK, k_HK = (unit.repeat_interleave(heads // len(unit), 0) for unit in units)
    kept_HKV = t["g"].exp().view(heads, -1, 1) * state + torch.zeros(heads, q_HK.shape[1], t["v"].shape[1])
    error_HV = t["v"] - torch.einsum("hk,hkv->hv", k_HK, kept_HKV)
    state = kept_HKV + torch.einsum("hk,hv->hkv", k_HK, error_HV * t["beta"].unsqueeze(1))
    return state, torch.einsum("hk,hkv->hv", q_HK * q_HK.shape[1] ** -0.5, state)


def convolution(x_LC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
    """Return each channel's causal convolution over its last W tokens, [L, C], one token at a time."""
    width, rows = weight_CW.shape[1], []
    for at in range(len(x_LC)):
        seen_NC = x_LC[max(0, at + 1 - width) : at + 1]
        rows.append((seen_NC.T * weight_CW[:, width - len(seen_NC) :]).sum(1))
    out = torch.stack(rows)
    return out if bias_C is None else out + bias_C


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step computes of a sequence: tokens ``start`` to ``stop``."""

    sequence: int
    start: int
    stop: int


def schedule(lengths: Sequence[int], cuts: Sequence[Sequence[int]]) -> Iterator[list[Piece]]:
    """Yield steps: ``cuts`` says for each sequence where its pieces end, its length excluded. Sequences with one new
    token go first, as the engine does.
    """
    bounds = [[0, *cut, length] for cut, length in zip(cuts, lengths, strict=True)]
    for turn in range(max(len(bound) for bound in bounds) - 1):
        pieces = [Piece(i, b[turn], b[turn + 1]) for i, b in enumerate(bounds) if turn + 1 < len(b)]
        yield sorted(pieces, key=lambda piece: piece.stop - piece.start != 1)


def make_step(pieces: Sequence[Piece], pages: Sequence[tuple[int, int]], device: torch.device) -> AttentionStep:
    """Return a step of layers with states; ``pages`` are those before and after, by sequence."""
    counts = np.array([piece.stop - piece.start for piece in pieces], dtype=np.int32)
    lengths = np.array([piece.stop for piece in pieces], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
    states = [pages[piece.sequence] for piece in pieces]
    return AttentionStep(
        num_tokens=int(starts[-1]),
        num_sequences=len(pieces),
        num_decodes=int((counts == 1).sum()),
        max_query=int(counts.max()),
        max_length=int(lengths.max()),
        query_start=torch.from_numpy(starts).to(device),
        lengths=torch.from_numpy(lengths).to(device),
        block_table=torch.tensor([[after] for _, after in states], dtype=torch.int32, device=device),
        slots=torch.zeros(int(starts[-1]), dtype=torch.int64, device=device),
        positions=torch.from_numpy(positions.astype(np.int64)).to(device),
        query_start_host=starts,
        lengths_host=lengths,
        states=torch.tensor(states, dtype=torch.int32, device=device),
    )


class StateRun:
    """A layer with states, its planes full of NaN, and what its sequences have computed so far.

    Each piece of a sequence goes on from where the last one left its state, and leaves its own in another page.
    """

    def __init__(self, backend: Any, kind: str, sequences: int, device: torch.device) -> None:
        request = state_request(kind)
        self.spec = backend.cache_specs(request)[0]
        env = AttentionEnv(request, self.spec, 16, device, settings_of(backend))
        self.layer, self._builder, self._device = backend.layer(env, 0), backend.metadata_builder(env), device
        self._pages = [-1] * sequences
        self._free = iter(range(1, 1000))
        self.planes = {plane.name: empty_plane(plane, 1000, 1, device) for plane in self.spec.planes}

    def begin(self, pieces: Sequence[Piece], in_place: bool) -> Any:
        """Return the metadata of a step."""
        moves = []
        for before in self._pages:
            after = before if in_place and before >= 0 else next(self._free)
            moves.append((before, after))
        step = make_step(pieces, moves, self._device)
        for piece in pieces:
            self._pages[piece.sequence] = moves[piece.sequence][1]
        self._builder.allocate(StepLimits(step.num_tokens, step.num_sequences, 1, step.max_length))
        return self._builder.build(step)


def run_states(
    backend: Any,
    kind: str,
    inputs: Inputs,
    cuts: Sequence[Sequence[int]],
    device: torch.device,
    *,
    in_place: bool = False,
) -> list[torch.Tensor]:
    """Return the outputs [L, ...] of all sequences, computed in pieces."""
    lengths = [len(next(iter(tokens.values()))) for tokens in inputs.sequences]
    made = StateRun(backend, kind, len(lengths), device)
    constants = {name: value.float().to(device) for name, value in inputs.constants.items()}
    rows: list[list[torch.Tensor]] = [[] for _ in lengths]
    for pieces in schedule(lengths, cuts):
        metadata = made.begin(pieces, in_place)
        tokens = _gather(inputs.sequences, pieces, device)
        count = sum(piece.stop - piece.start for piece in pieces)
        out = torch.full((count, *inputs.out_shape), float("nan"), device=device)
        made.layer.mix({**tokens, **constants}, made.planes, metadata, out)
        _scatter(out, pieces, rows)
    return [torch.cat(parts) for parts in rows]


def run_convolution(
    backend: Any, kind: str, inputs: Inputs, cuts: Sequence[Sequence[int]], device: torch.device
) -> list[torch.Tensor]:
    """Return silu(convolution) of ``x`` [L, C] of all sequences, computed in pieces by ``convolve``."""
    lengths = [len(tokens["x"]) for tokens in inputs.sequences]
    made = StateRun(backend, kind, len(lengths), device)
    weight, bias = (inputs.constants[name].float().to(device) for name in ("weight", "bias"))
    rows: list[list[torch.Tensor]] = [[] for _ in lengths]
    for pieces in schedule(lengths, cuts):
        metadata = made.begin(pieces, False)
        x = _gather(inputs.sequences, pieces, device)["x"]
        out = torch.full_like(x, float("nan"))
        made.layer.convolve(x, weight, bias, made.planes, metadata, out)
        _scatter(out, pieces, rows)
    return [torch.cat(parts) for parts in rows]


def _gather(sequences: Sequence[Tensors], pieces: Sequence[Piece], device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([sequences[p.sequence][name][p.start : p.stop] for p in pieces]).float().to(device)
        for name in sequences[0]
    }


def _scatter(out: torch.Tensor, pieces: Sequence[Piece], rows: list[list[torch.Tensor]]) -> None:
    for piece, part in zip(pieces, torch.split(out, [p.stop - p.start for p in pieces]), strict=True):
        rows[piece.sequence].append(part.double().cpu())
