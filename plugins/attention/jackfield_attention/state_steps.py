"""What recurrent layers share: the metadata of a step, and the short convolution.

Legend: T tokens, B sequences, D leading sequences with one new token, C channels, W width of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits
from jackfield_attention.state_scans import (
    decayed_attention,
    decayed_step,
    delta_attention,
    delta_step,
    selective_scan,
    selective_step,
)

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
    first = slice(0, metadata.decodes)
    if metadata.decodes:
        seen_DCW = torch.cat((metadata.load(plane, first).to(x_TC.dtype), x_TC[first].unsqueeze(-1)), -1)
        sums = (seen_DCW * weight_CW).sum(-1)
        out_TC[first] = activation(sums if bias_C is None else sums + bias_C)
        metadata.store(plane, first, seen_DCW[..., 1:])
    convolve_long(x_TC, weight_CW, bias_C, plane, metadata, out_TC, activation)


def convolve_long(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    plane: torch.Tensor,
    metadata: StateMetadata,
    out_TC: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Do so for sequences with more than one new token."""
    keep = weight_CW.shape[1] - 1
    for index, tokens in metadata.long():
        seen_CL = torch.cat((metadata.load(plane, index).to(x_TC.dtype), x_TC[tokens].T), -1)
        sums_CT = F.conv1d(seen_CL, weight_CW.unsqueeze(1), bias_C, groups=len(weight_CW))
        out_TC[tokens] = activation(sums_CT).T
        metadata.store(plane, index, seen_CL[:, seen_CL.shape[1] - keep :])


def same(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``: no activation."""
    return x


RECURRENCES: Mapping[str, tuple[Recurrence, Recurrence]] = {
    "selective": (selective_scan, selective_step),
    "decayed": (decayed_attention, decayed_step),
    "delta": (delta_attention, delta_step),
}
"""Each for tokens of one sequence, and for one token of each of many."""


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

    def advance(
        self,
        recurrence: str,
        inputs: tuple[torch.Tensor, ...],
        plane: torch.Tensor,
        metadata: StateMetadata,
        out: torch.Tensor,
        added: torch.Tensor | None = None,
        constants: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """Advance states by the new tokens.

        Args:
            recurrence: which of ``RECURRENCES``. inputs: [T, ...] each. plane: the states. out: [T, ...]. added: what
                is added to the outputs. constants: what comes before the inputs.
        """
        self._advance_decodes(recurrence, constants, inputs, plane, metadata, out, added)
        run_long(partial(RECURRENCES[recurrence][0], *constants), inputs, plane, metadata, out, added)

    def _advance_decodes(
        self,
        recurrence: str,
        constants: tuple[torch.Tensor, ...],
        inputs: tuple[torch.Tensor, ...],
        plane: torch.Tensor,
        metadata: Any,
        out: torch.Tensor,
        added: torch.Tensor | None,
    ) -> None:
        """Advance the sequences with one new token."""
        run_steps(partial(RECURRENCES[recurrence][1], *constants), inputs, plane, metadata, out, added)

    def commit(self, state: State, metadata: StateMetadata, accepted: torch.Tensor) -> None:
        """States of drafts are not kept."""
        raise NotImplementedError("states of draft tokens are not kept")


def run_steps(
    step: Recurrence,
    inputs: tuple[torch.Tensor, ...],
    plane: torch.Tensor,
    metadata: StateMetadata,
    out: torch.Tensor,
    added: torch.Tensor | None,
) -> None:
    """Advance all sequences with one new token at once. ``step`` takes ``inputs`` and the states, and returns outputs
    and the states behind them; the rest as in :meth:`StateLayer.advance`.
    """
    first = slice(0, metadata.decodes)
    if metadata.decodes:
        o, last = step(*(value[first] for value in inputs), metadata.load(plane, first))
        out[first] = (o if added is None else o + added[first]).to(out.dtype)
        metadata.store(plane, first, last)


def run_long(
    long: Recurrence,
    inputs: tuple[torch.Tensor, ...],
    plane: torch.Tensor,
    metadata: StateMetadata,
    out: torch.Tensor,
    added: torch.Tensor | None,
) -> None:
    """Advance sequences with more tokens one by one; see :func:`run_steps`."""
    for index, tokens in metadata.long():
        o, last = long(*(value[tokens] for value in inputs), metadata.load(plane, index))
        out[tokens] = (o if added is None else o + added[tokens]).to(out.dtype)
        metadata.store(plane, index, last)
