"""Prompts in chunks: which tokens of which sequence a program of the kernels over chunks takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from jackfield.interfaces import AttentionEnv, AttentionStep
from jackfield_attention.transfer import sent
from jackfield_attention.triton_tuning import roomy

LARGE, SMALL = 128, 64
"""Tokens in a chunk. The states before all chunks are written and read once: large chunks have fewer, but need room."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The sequences of a step with more than one new token. All tensors are int32.

    Args:
        rows: most tokens in a chunk. table: [N, 2] sequence and first new token of each chunk, those of a sequence in
            order. owners: [S, 2] each sequence and its first chunk. query_start: [B + 1] as in the step.
    """

    rows: int
    table: torch.Tensor
    owners: torch.Tensor
    query_start: torch.Tensor


def chunk_rows(env: AttentionEnv) -> int:
    """Return how many tokens a chunk has on this device, for this type."""
    return LARGE if roomy(env) and env.request.dtype == "bfloat16" else SMALL


def chunks_of(step: AttentionStep, rows: int, device: torch.device) -> Chunks | None:
    """Return the chunks of a step, or None if each sequence has one new token. Counts may be upper bounds: kernels read
    the real ones on the device.
    """
    decodes = step.num_decodes
    counts = np.diff(step.query_start_host[decodes : step.num_sequences + 1]).astype(np.int64)
    if not len(counts):
        return None
    each = -(-counts // rows)
    ends = np.cumsum(each)
    owner = np.repeat(np.arange(len(counts)), each)
    table = np.stack((owner + decodes, (np.arange(len(owner)) - (ends - each)[owner]) * rows), axis=1)
    owners = np.stack((np.arange(len(counts)) + decodes, ends - each), axis=1)
    both = sent(np.concatenate((table, owners)).astype(np.int32), device)
    return Chunks(rows, both[: len(table)], both[len(table) :], step.query_start)
