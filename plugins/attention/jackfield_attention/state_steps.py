"""What recurrent layers share: the metadata of a step, and the short convolution.

Legend: T tokens, B sequences, D leading sequences with one new token, C channels, W width of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits

State = Mapping[str, torch.Tensor]
Inputs = Mapping[str, torch.Tensor]
Recurrence = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class StateMetadata:
    """One step.

    Args:
        decodes: D. starts: [B + 1] first token of each sequence, on the host. before, after: [B] int64 pages of the
            states; ``fresh`` [B] says which sequences begin here, with a state of zeros.
    """

    decodes: int
    starts: list[int]
    before: torch.Tensor
    after: torch.Tensor
    fresh: torch.Tensor

    def long(self) -> Iterator[tuple[int, slice]]:
        """Return the sequences with more than one new token: index, and their tokens."""
        for index in range(self.decodes, len(self.starts) - 1):
            yield index, slice(self.starts[index], self.starts[index + 1])

    def load(self, plane: torch.Tensor, index: slice | int) -> torch.Tensor:
        """Return the states before the step, one for each sequence of a slice."""
        where = index if isinstance(index, slice) else slice(index, index + 1)
        kept = plane[self.before[where]]
        fresh = self.fresh[where].view(-1, *(1,) * (kept.dim() - 1))
        found = kept.masked_fill(fresh, 0)
        return found if isinstance(index, slice) else found[0]

    def store(self, plane: torch.Tensor, index: slice | int, states: torch.Tensor) -> None:
        """Leave the states behind the step."""
        if isinstance(index, slice):
            plane[self.after[index]] = states.to(plane.dtype)
        else:
            plane[self.after[index : index + 1]] = states.to(plane.dtype).unsqueeze(0)


class StateMetadataBuilder:
    """Says where the states of a step lie."""

    host_lengths = HostLengths.NONE

    def __init__(self, env: AttentionEnv) -> None:
        self._env = env

    def allocate(self, limits: StepLimits) -> None:
        """Nothing to keep: sizes differ from step to step."""

    def capture(self, num_sequences: int, max_query: int) -> Any:
        """Graphs are not supported."""
        raise NotImplementedError("states in plain torch cannot be part of a graph")

    def advance(self, tokens: int) -> Any:
        """Draft steps are built like any other."""
        raise NotImplementedError("every step is built anew")

    def build(self, step: AttentionStep) -> StateMetadata:
        """Return the metadata of ``step``."""
        assert step.states is not None, "layers with states are in groups that keep states"
        before, after = step.states.long().unbind(1)
        starts = step.query_start_host.tolist()
        return StateMetadata(step.num_decodes, starts, before.clamp(min=0), after, before < 0)


def convolve(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    plane: torch.Tensor,
    metadata: StateMetadata,
    out_TC: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
) -> None:
    """Write the activation of each channel's causal convolution, going on from the last W - 1 tokens in ``plane``
    [pages, C, W - 1], and keep the last ones of this step there.
    """
    keep = weight_CW.shape[1] - 1
    first = slice(0, metadata.decodes)
    if metadata.decodes:
        seen_DCW = torch.cat((metadata.load(plane, first).to(x_TC.dtype), x_TC[first].unsqueeze(-1)), -1)
        sums = (seen_DCW * weight_CW).sum(-1)
        out_TC[first] = activation(sums if bias_C is None else sums + bias_C)
        metadata.store(plane, first, seen_DCW[..., 1:])
    for index, tokens in metadata.long():
        seen_CL = torch.cat((metadata.load(plane, index).to(x_TC.dtype), x_TC[tokens].T), -1)
        sums_CT = F.conv1d(seen_CL, weight_CW.unsqueeze(1), bias_C, groups=len(weight_CW))
        out_TC[tokens] = activation(sums_CT).T
        metadata.store(plane, index, seen_CL[:, seen_CL.shape[1] - keep :])


def same(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``: no activation."""
    return x


class StateLayer:
    """A layer with a short convolution."""

    def __init__(self, env: AttentionEnv) -> None:
        self._request = env.request

    def convolve(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        state: State,
        metadata: StateMetadata,
        out_TC: torch.Tensor,
    ) -> None:
        """See RecurrentLayer."""
        convolve(x_TC, weight_CW, bias_C, state["conv"], metadata, out_TC)

    def commit(self, state: State, metadata: StateMetadata, accepted: torch.Tensor) -> None:
        """States of drafts are not kept."""
        raise NotImplementedError("states of draft tokens are not kept")


def run(
    long: Recurrence,
    step: Recurrence,
    inputs: tuple[torch.Tensor, ...],
    plane: torch.Tensor,
    metadata: StateMetadata,
    out: torch.Tensor,
    added: torch.Tensor | None = None,
) -> None:
    """Run a recurrence: all single tokens at once by ``step``, longer pieces one by one by ``long``.

    Args:
        long, step: take ``inputs`` and the states, return outputs and the states behind them. inputs: [T, ...].
            plane: the states. added: what is added to the outputs.
    """
    first = slice(0, metadata.decodes)
    jobs: list[tuple[Recurrence, slice | int, slice]] = [(step, first, first)] if metadata.decodes else []
    jobs += [(long, index, tokens) for index, tokens in metadata.long()]
    for work, index, tokens in jobs:
        o, last = work(*(value[tokens] for value in inputs), metadata.load(plane, index))
        out[tokens] = (o if added is None else o + added[tokens]).to(out.dtype)
        metadata.store(plane, index, last)
