"""Layers with states by Triton kernels. Legend: T tokens, D sequences with one new token, C channels, W width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from jackfield.interfaces import AttentionEnv, AttentionStep, StepLimits
from jackfield_attention.state_steps import Inputs, State, StateLayer, StateMetadata, StateMetadataBuilder, same
from jackfield_attention.torch_linear_layer import DeltaLayer, LinearLayer
from jackfield_attention.torch_mamba_layer import Mamba1Layer, Mamba2Layer
from jackfield_attention.triton_ssd import SsdInputs, ssd
from jackfield_attention.triton_state_chunks import Chunks, chunk_rows, chunks_of
from jackfield_attention.triton_state_kernels import (
    conv_chunk_kernel,
    conv_step_kernel,
    selective_step_kernel,
    state_step_kernel,
)
from jackfield_attention.triton_tuning import FEW_CORES
from jackfield_triton.launch import power_of_two

KEYS_TILE = 4096
"""Numbers of a state that a program holds."""
CHANNELS = 128
"""Channels of a convolution that a program takes."""
CHUNK_CHANNELS = 64
"""The same where it takes the tokens of a chunk."""
TOKENS = ("x", "dt", "b", "c")
"""Inputs of Mamba-2 that differ from token to token."""


@dataclass(slots=True)
class TritonStateMetadata(StateMetadata):
    """``pages`` [B, 2] int64, contiguous: before (negative: a state of zeros) and after, as kernels read them.
    ``chunks``: of the sequences with more than one new token, if there are any.
    """

    pages: torch.Tensor
    chunks: Chunks | None = None


class TritonStateBuilder(StateMetadataBuilder):
    """Says where the states of a step lie; recorded steps read it where the first one did."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._most = 0
        self._rows = chunk_rows(env)
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
        chunks = chunks_of(step, self._rows, self._env.device)
        return self._made(pages.long(), step.num_decodes, step.query_start_host.tolist(), chunks)

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
    def _made(
        pages_B2: torch.Tensor, decodes: int, starts: list[int], chunks: Chunks | None = None
    ) -> TritonStateMetadata:
        before, after = pages_B2.unbind(1)
        return TritonStateMetadata(decodes, starts, before.clamp(min=0), after, before < 0, pages_B2, chunks)


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
    """Do what ``state_steps.convolve`` does: one kernel for single tokens, one for chunks."""
    assert isinstance(metadata, TritonStateMetadata)
    channels, width = weight_CW.shape
    tensors = (x_TC, weight_CW.contiguous(), weight_CW if bias_C is None else bias_C, plane, out_TC, metadata.pages)
    strides = (x_TC.stride(0), plane.stride(0), out_TC.stride(0))
    options = {
        "C": channels,
        "W": width,
        "W_WIDTH": power_of_two(max(1, width - 1)),
        "BIAS": bias_C is not None,
        "SILU": activation is F.silu,
    }
    if metadata.decodes:
        grid = (metadata.decodes, -(-channels // CHANNELS))
        conv_step_kernel[grid](*tensors, *strides, TILE=CHANNELS, num_warps=4, **options)
    chunks = metadata.chunks
    if chunks is not None:
        assert width - 1 <= chunks.rows, "what is kept lies in a sequence's first chunk"
        conv_chunk_kernel[(len(chunks.table), -(-channels // CHUNK_CHANNELS))](
            *tensors,
            chunks.table,
            chunks.query_start,
            *strides,
            ROWS=chunks.rows,
            TILE=CHUNK_CHANNELS,
            num_warps=8,
            **options,
        )


class TritonMamba1(TritonStates, Mamba1Layer):
    """See Mamba1Layer."""


class TritonMamba2(TritonStates, Mamba2Layer):
    """See Mamba2Layer. Chunks take the inputs as they are; only single tokens are prepared by torch."""

    def mix(self, inputs: Inputs, state: State, metadata: StateMetadata, out: torch.Tensor) -> None:
        """See RecurrentLayer. ``out`` is [T, H, V]."""
        assert isinstance(metadata, TritonStateMetadata)
        first = slice(0, metadata.decodes)
        if metadata.decodes:
            single = {name: value[first] if name in TOKENS else value for name, value in inputs.items()}
            super().mix(single, state, metadata, out[first])
        if metadata.chunks is not None:
            tokens = {name: _packed(inputs[name]) for name in TOKENS}
            constants = {name: inputs[name] for name in ("a", "d", "dt_bias")}
            limits = self._request.extra.get("dt_limit", (0.0, float("inf")))
            cores = (self._request.device.cores if self._request.device else 0) or FEW_CORES
            given = SsdInputs(**tokens, **constants, limits=limits)
            ssd(given, state["state"], metadata.pages, metadata.chunks, out, cores)

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
        """Advance the states of sequences with one new token; :meth:`mix` does the rest."""
        assert isinstance(metadata, TritonStateMetadata)
        self._advance_decodes(recurrence, constants, inputs, plane, metadata, out, added)


class TritonLinear(TritonStates, LinearLayer):
    """See LinearLayer."""


class TritonDelta(TritonStates, DeltaLayer):
    """See DeltaLayer."""


class TritonShortConv(TritonStates):
    """See ShortConvLayer."""

    def mix(self, inputs: Inputs, state: State, metadata: StateMetadata, out: torch.Tensor) -> None:
        """See RecurrentLayer."""
        convolve_both(inputs["x"], inputs["weight"], inputs.get("bias"), state["conv"], metadata, out, same)


def _packed(tokens: torch.Tensor) -> torch.Tensor:
    """Return what has its features one after another, as kernels read them."""
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


LAYERS: Mapping[str, type[StateLayer]] = {
    "mamba1": TritonMamba1,
    "mamba2": TritonMamba2,
    "linear": TritonLinear,
    "gdn": TritonDelta,
    "kda": TritonDelta,
    "short_conv": TritonShortConv,
}
