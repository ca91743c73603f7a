"""Ops: small tensor functions that models and the engine are made of, each chosen on its own. Group
``jackfield.ops.v1``.

A provider is one plugin that offers several ops. For each op the oracle chooses one provider; the torch reference is
a provider like any other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces.plugin import Plugin, Request, Settings

if TYPE_CHECKING:
    import numpy as np
    import torch

OPS: Mapping[str, str] = {
    "rms_norm": "(x_TE, weight_E, eps) -> y_TE",
    "fused_add_rms_norm": "(x_TE, residual_TE, weight_E, eps) -> (y_TE, sum_TE)",
    "silu_and_mul": "(x_T2F) -> y_TF",
    "gelu_and_mul": "(x_T2F) -> y_TF, exact (erf)",
    "gelu_tanh_and_mul": "(x_T2F) -> y_TF, tanh form",
    "rotary": "(x_THD, cos_sin_TR) -> x_THD, in place; pairs are (i, i + R/2)",
}
"""The published ops and their signatures; shapes in suffixes (T tokens, E width, F intermediate, H and K heads, D
head size, P positions, R rotary size).
"""

QUANTIZING_OPS: Mapping[str, str] = {
    "rms_norm_quant": "(x_TE, weight_E, eps) -> QuantizedActivation",
    "fused_add_rms_norm_quant": "(x_TE, residual_TE, weight_E, eps) -> (QuantizedActivation, sum_TE)",
    "silu_and_mul_quant": "(x_T2F) -> QuantizedActivation",
    "gelu_and_mul_quant": "(x_T2F) -> QuantizedActivation",
    "gelu_tanh_and_mul_quant": "(x_T2F) -> QuantizedActivation",
}
"""Ops that give what the op without ``_quant`` gives, in float8_e4m3fn with a float32 scale for each row, whose largest
number becomes the type's largest. Asked for only where the quantization method declares the feature
``quantized_activations``.
"""

SAMPLING_OPS: Mapping[str, str] = {
    "draw_tokens": "(logits_RV, DrawBatch) -> ids_R, int64",
}
"""Ops of the sampler. ``draw_tokens`` applies temperature, min_p, top_k and top_p, in that order, and draws one token
for each row; rows of temperature 0 take the largest logit. Equal logits count in the order of their ids. What is drawn
may depend on the row's logits, parameters, seed and position, and on nothing else.
"""

ROUTING_OPS: Mapping[str, str] = {
    "route_experts": "(logits_TX, MoEConfig, bias_X or None) -> (weights_TS float32, experts_TS int64)",
}
"""Ops of blocks of experts: which experts a token goes to, for every scoring that ``jackfield.layers.routing.SCORES``
names. Asked for only where the model has experts. Equal scores go to the lower index; a row's choice may depend on the
row and on nothing else.
"""

STEP_OPS: Mapping[str, str] = {
    "greedy_tokens": "(logits_RV) -> ids_R, int64",
    "token_inputs": "(tokens_SL, table_SM, slots_B, starts_B, counts_B or None, width, block_size, "
    "shift=0) -> TokenInputs",
    "begin_round": "(tokens_SL, known_S, proposed_S, slots_B, starts_B, counts_B, drafts_KB) -> "
    "(starts_B, counts_B, drafts_BK)",
    "keep_tokens": "(tokens_SL, known_S, slots_B, starts_B, counts_B, drafts_BK, ids_BN) -> (kept_B, last_B)",
    "end_round": "(tokens_SL, proposed_S, slots_B, starts_B, kept_B, room_B, ids_BN, found_BK, vocab_size) -> "
    "result, int32 [B, N + K]",
}
"""Ops around the model in recorded steps, where each launch counts; ``jackfield.layers.step_ops`` says what they do.
Numbers are int64, tables of tokens and blocks int32.
"""

REGIONS = frozenset({"decode_layer", "decode_step"})
"""Larger pieces that a provider may take over as one persistent kernel."""


@dataclass(frozen=True, slots=True)
class DrawBatch:
    """Rows that sample, and the parameters of all slots, on the host and on the device.

    Args:
        slots: [R] slot of each row. slots_device: the same, int64. positions: [R] of the tokens to draw.
        numbers: float32 [S] by name: ``temperature`` (0 for greedy slots), ``top_p``, ``min_p``. top_k: int64 [S], 0
            keeps all. seeds: int64 [S]. host, host_top_k, greedy: the same on the host, to choose ways without asking
            the device.
    """

    slots: np.ndarray[Any, Any]
    slots_device: torch.Tensor
    positions: np.ndarray[Any, Any]
    numbers: Mapping[str, torch.Tensor]
    top_k: torch.Tensor
    seeds: torch.Tensor
    host: Mapping[str, np.ndarray[Any, Any]]
    host_top_k: np.ndarray[Any, Any]
    greedy: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What tokens of a step take from the tables of running sequences. T tokens of B sequences, M blocks.

    Args:
        ids, next_ids: [T] int64, the tokens and what stands behind each. positions: [T] int64. slots: [T] int64, places
            in the cache, -1: not kept. table: [B, M] int32. lengths: [B] int32, tokens behind the step.
    """

    ids: torch.Tensor
    next_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRequest(Request):
    """Asks for one op; ``kind`` is its name. ``sizes`` holds what is known of its shapes."""

    sizes: Mapping[str, int] = field(default_factory=dict)


class OpsProvider(Plugin):
    """A set of op implementations. ``kinds`` are the names of the ops it has."""

    family: ClassVar[str] = "ops"

    @classmethod
    @abstractmethod
    def build(cls, op: str, request: OpRequest, settings: Settings) -> Callable[..., Any]:
        """Return the function for one op, with the signature in :data:`OPS` and its kin."""
