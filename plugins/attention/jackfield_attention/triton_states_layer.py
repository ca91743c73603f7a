"""Layers with states by Triton kernels. Legend: T tokens, D sequences with one new token, C channels, W width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from jackfield.interfaces import AttentionEnv, AttentionStep, StepLimits
from jackfield_attention.state_steps import (
    Inputs,
    State,
    StateLayer,
    StateMetadata,
    StateMetadataBuilder,
    convolve_long,
    same,
)
from jackfield_attention.torch_linear_layer import DeltaLayer, LinearLayer
from jackfield_attention.torch_mamba_layer import Mamba1Layer, Mamba2Layer
from jackfield_attention.triton_state_kernels import conv_step_kernel, selective_step_kernel, state_step_kernel
from jackfield_triton.launch import power_of_two

KEYS_TILE = 4096
"""Numbers of a state that a program holds."""
CHANNELS = 128
"""Channels of a convolution that a program takes."""


@dataclass(slots=True)
class TritonStateMetadata(StateMetadata):
    """``pages`` [B, 2] int64, contiguous: before (negative: a state of zeros) and after, as kernels read them."""

    pages: torch.Tensor


class TritonStateBuilder(StateMetadataBuilder):
    """Says where the states of a step lie; recorded steps read it where the first one did."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._most = 0
        self._recorded: torch.Tensor | None = None

    def allocate(self, limits: StepLimits) -> None:
        """See MetadataBuilder."""
        self._most = limits.max_sequences

    def build(self, step: AttentionStep) -> TritonStateMetadata:
        """See MetadataBuilder. After :meth:`capture` a step of single tokens is copied to where graphs read it."""
        assert step.states is not None, "layers with states are in groups that keep states"
        pages, count = step.states, step.num_sequences
        if self._recorded is not None and step.num_decodes == count:
            self._recorded[:count].copy_(pages)
            pages = self._recorded[:count]
        return self._made(pages.long(), step.num_decodes, step.query_start_host.tolist())

    def capture(self, num_sequences: int, max_query: int) -> TritonStateMetadata:
        """See MetadataBuilder. Nothing is left behind for a sequence whose pages are negative.

        Raises:
            NotImplementedError: queries have more than one token.
        """
        if max_query > 1:
            raise NotImplementedError("triton_states records steps of single tokens only")
        if self._recorded is None:
            self._recorded = torch.full((self._most, 2), -1, dtype=torch.int64, device=self._env.device)
        return self._made(self._recorded[:num_sequences], num_sequences, list(range(num_sequences + 1)))

    @staticmethod
    def _made(pages_B2: torch.Tensor, decodes: int, starts: list[int]) -> TritonStateMetadata:
        before, after = pages_B2.unbind(1)
        return TritonStateMetadata(decodes, starts, before.clamp(min=0), after, before < 0, pages_B2)


class TritonStates(StateLayer):
    """What the layers of all kinds share."""

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
        convolve_both(x_TC, weight_CW, bias_C, state["conv"], metadata, out_TC, F.silu)

    def _advance_decodes(
        self,
        recurrence: str,
        constants: tuple[torch.Tensor, ...],
        inputs: tuple[torch.Tensor, ...],
        plane: torch.Tensor,
        metadata: TritonStateMetadata,
        out: torch.Tensor,
        added: torch.Tensor | None,
    ) -> None:
        if not metadata.decodes:
            return
        first = tuple(value[: metadata.decodes].contiguous() for value in inputs)
        more = None if added is None else added[: metadata.decodes].contiguous()
        if recurrence == "selective":
            assert more is not None
            selective((*constants, *first, more), plane, metadata, out)
        else:
            stepped(first, plane, metadata, out, more)


def stepped(
    inputs: tuple[torch.Tensor, ...],
    plane: torch.Tensor,
    metadata: TritonStateMetadata,
    out: torch.Tensor,
    added: torch.Tensor | None,
) -> None:
    """Launch one step of (q, k, v, g) or, for the delta rule, (q, k, v, g, beta)."""
    q_DHK, k_DHK, v_DHV, g = inputs[:4]
    beta_DH = inputs[4] if len(inputs) > 4 else None
    (count, heads, keys), values = q_DHK.shape, v_DHV.shape[-1]
    by_key = g.dim() == 3 and g.shape[-1] == keys and keys > 1
    width = power_of_two(keys)
    tile = max(1, min(power_of_two(values), KEYS_TILE // width))
    state_step_kernel[(count, heads, -(-values // tile))](
        q_DHK,
        k_DHK,
        v_DHV,
        g,
        g if beta_DH is None else beta_DH,
        g if added is None else added,
        plane,
        out,
        metadata.pages,
        plane.stride(0),
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        K=keys,
        V=values,
        K_WIDTH=width,
        TILE=tile,
        DELTA=beta_DH is not None,
        BY_KEY=by_key,
        ADDED=added is not None,
        num_warps=4,
    )


def selective(
    inputs: tuple[torch.Tensor, ...], plane: torch.Tensor, metadata: TritonStateMetadata, out_TI: torch.Tensor
) -> None:
    """Launch one step of Mamba-1: (a [I, N], x, dt [D, I], b, c [D, N], and what is added [D, I])."""
    a_IN, x_DI, dt_DI, b_DN, c_DN, added_DI = inputs
    channels, size = a_IN.shape
    width = power_of_two(size)
    tile = max(1, min(power_of_two(channels), KEYS_TILE // width))
    selective_step_kernel[(len(x_DI), -(-channels // tile))](
        a_IN.contiguous(),
        x_DI,
        dt_DI,
        b_DN,
        c_DN,
        added_DI,
        plane,
        out_TI,
        metadata.pages,
        plane.stride(0),
        out_TI.stride(0),
        CHANNELS=channels,
        N=size,
        N_WIDTH=width,
        TILE=tile,
        num_warps=4,
    )


def convolve_both(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    plane: torch.Tensor,
    metadata: StateMetadata,
    out_TC: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Do what ``state_steps.convolve`` does, single tokens by a kernel."""
    assert isinstance(metadata, TritonStateMetadata)
    channels, width = weight_CW.shape
    if metadata.decodes:
        conv_step_kernel[(metadata.decodes, -(-channels // CHANNELS))](
            x_TC,
            weight_CW.contiguous(),
            weight_CW if bias_C is None else bias_C,
            plane,
            out_TC,
            metadata.pages,
            x_TC.stride(0),
            plane.stride(0),
            out_TC.stride(0),
            C=channels,
            W=width,
            W_WIDTH=power_of_two(max(1, width - 1)),
            TILE=CHANNELS,
            BIAS=bias_C is not None,
            SILU=activation is F.silu,
            num_warps=4,
        )
    convolve_long(x_TC, weight_CW, bias_C, plane, metadata, out_TC, activation)


class TritonMamba1(TritonStates, Mamba1Layer):
    """See Mamba1Layer."""


class TritonMamba2(TritonStates, Mamba2Layer):
    """See Mamba2Layer."""


class TritonLinear(TritonStates, LinearLayer):
    """See LinearLayer."""


class TritonDelta(TritonStates, DeltaLayer):
    """See DeltaLayer."""


class TritonShortConv(TritonStates):
    """See ShortConvLayer."""

    def mix(self, inputs: Inputs, state: State, metadata: StateMetadata, out: torch.Tensor) -> None:
        """See RecurrentLayer."""
        convolve_both(inputs["x"], inputs["weight"], inputs.get("bias"), state["conv"], metadata, out, same)


LAYERS: Mapping[str, type[StateLayer]] = {
    "mamba1": TritonMamba1,
    "mamba2": TritonMamba2,
    "linear": TritonLinear,
    "gdn": TritonDelta,
    "kda": TritonDelta,
    "short_conv": TritonShortConv,
}
