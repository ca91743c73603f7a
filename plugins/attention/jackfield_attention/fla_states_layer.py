"""Layers with states by kernels of flash-linear-attention, which take tokens as [batch, tokens, heads, size].

Legend: T tokens, B sequences, D leading sequences with one new token, L sequences with more, N their tokens, G key
heads, H value heads (a multiple of them), K key size, V value size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch

from jackfield.interfaces import AttentionEnv, AttentionStep
from jackfield_attention.state_steps import Inputs, State, StateLayer, StateMetadata, StateMetadataBuilder

Tokens = dict[str, torch.Tensor]
Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]

NAMES: Mapping[str, tuple[str, str, str]] = {
    "gdn": ("gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("kda", "chunk_kda", "fused_recurrent_kda"),
    "linear": ("simple_gla", "chunk_simple_gla", "fused_recurrent_simple_gla"),
}
"""Module of the package's operators, its kernel for chunks and the one for single tokens, by layer kind."""


@dataclass(frozen=True, slots=True)
class FlaKernels:
    """Kernels of one kind.

    Both take keywords, and states before the step as ``initial_state`` [sequences, H, K, V] float32; both return
    outputs and the states behind it. ``chunk`` takes all sequences as one of a batch of 1, with ``cu_seqlens``; in
    ``step`` each is one of the batch, with one token.
    """

    chunk: Kernel
    step: Kernel


def kernels_of(kind: str) -> FlaKernels:
    """Return the package's kernels for layers of ``kind``.

    Raises:
        ImportError: the package, or what it needs, is not there.
    """
    module, chunk, step = NAMES[kind]
    found = import_module(f"fla.ops.{module}")
    return FlaKernels(getattr(found, chunk), getattr(found, step))


@dataclass(slots=True)
class FlaMetadata(StateMetadata):
    """``long_starts`` [L + 1] int64: first token of each sequence with more than one new token, the first of them at 0,
    then N; ``long_starts_host`` is the same on the host. The package remembers what it derives from them by object, so
    that all layers of a step get the same tensors, and another step others.
    """

    long_starts: torch.Tensor
    long_starts_host: torch.Tensor


class FlaMetadataBuilder(StateMetadataBuilder):
    """Says where states lie, and where long sequences begin."""

    def build(self, step: AttentionStep) -> FlaMetadata:
        """See MetadataBuilder."""
        built = super().build(step)
        # Each of the leading sequences has one token, so that their number is where the others' tokens begin.
        long = slice(step.num_decodes, step.num_sequences + 1)
        host = step.query_start_host[long].astype(np.int64) - step.num_decodes
        starts = step.query_start[long].long() - step.num_decodes
        return FlaMetadata(
            built.decodes, built.starts, built.before, built.after, built.fresh, starts, torch.from_numpy(host)
        )


class FlaLayer(StateLayer):
    """What layers of all kinds share."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._kernels = kernels_of(env.request.kind)

    @abstractmethod
    def _given(self, inputs: Inputs) -> tuple[Tokens, dict[str, float]]:
        """Return what kernels take: tensors with T in front, and constants."""

    def mix(self, inputs: Inputs, state: State, metadata: StateMetadata, out: torch.Tensor) -> None:
        """See RecurrentLayer. ``out`` is [T, H, V]."""
        assert isinstance(metadata, FlaMetadata)
        (tokens, constants), plane = self._given(inputs), state["state"]
        singles, sequences = metadata.decodes, len(metadata.starts) - 1
        if singles:
            which = slice(0, singles)
            given = {name: value[which].unsqueeze(1) for name, value in tokens.items()}
            before = metadata.load(plane, which)
            o_D1HV, after = self._kernels.step(**given, **constants, initial_state=before, output_final_state=True)
            out[which] = o_D1HV.squeeze(1).to(out.dtype)
            metadata.store(plane, which, after)
        if sequences > singles:
            which, rows = slice(singles, sequences), slice(singles, metadata.starts[-1])
            given = {name: value[rows].unsqueeze(0) for name, value in tokens.items()}
            o_1NHV, after = self._kernels.chunk(
                **given,
                **constants,
                initial_state=metadata.load(plane, which),
                output_final_state=True,
                cu_seqlens=metadata.long_starts,
                cu_seqlens_cpu=metadata.long_starts_host,
            )
            out[rows] = o_1NHV.squeeze(0).to(out.dtype)
            metadata.store(plane, which, after)


class FlaDelta(FlaLayer):
    """Inputs as of ``DeltaLayer``. Kernels bring queries and keys to length 1 and share key heads among neighbouring
    value heads; logarithms of decays and strengths are given as they are.
    """

    def _given(self, inputs: Inputs) -> tuple[Tokens, dict[str, float]]:
        tokens = _same_type(inputs)
        tokens |= {name: inputs[name].float() for name in ("g", "beta")}
        return tokens, {"scale": inputs["q"].shape[-1] ** -0.5, "use_qk_l2norm_in_kernel": True}


class FlaLinear(FlaLayer):
    """Inputs as of ``LinearLayer``. Scores are not scaled: kernels would by K^-1/2 if they were not told."""

    def _given(self, inputs: Inputs) -> tuple[Tokens, dict[str, float]]:
        tokens, heads = _same_type(inputs), inputs["v"].shape[1]
        # These kernels want as many key heads as value heads.
        for name in ("q", "k"):
            tokens[name] = tokens[name].repeat_interleave(heads // tokens[name].shape[1], 1)
        # One decay for a head would do (``g_gamma``), but of a chunk that is not full, tokens which are not there are
        # then multiplied by what they would not have lost: infinite where a head forgets fast, and 0 times that is NaN.
        tokens["g"] = inputs["g"].float().expand(len(inputs["v"]), -1)
        return tokens, {"scale": 1.0}


def _same_type(inputs: Inputs) -> Tokens:
    """Return queries, keys and values in the values' type: kernels multiply them as they are."""
    return {name: inputs[name].to(inputs["v"].dtype) for name in ("q", "k", "v")}


LAYERS: Mapping[str, type[FlaLayer]] = {"gdn": FlaDelta, "kda": FlaDelta, "linear": FlaLinear}
