"""The plan of one step and its result. Struct-of-arrays: a steady decode step handles no request one by one.

Legend: B sequences in the step, R rows that sample, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from jackfield.protocol.pooling_params import PoolingParams
from jackfield.protocol.requests import Feature, PooledResult, TokenLogprobs
from jackfield.protocol.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class NewSequence:
    """A sequence that takes a slot in this step (again, after preemption).

    Args:
        slot: its place in all per-sequence tables while it runs. request_id: for logs.
        token_ids: prompt and, after preemption, output so far. prompt_length: how many of them are the prompt.
        params: sampling parameters. processors: names of the logits processors that want it. eos_token_ids: end ids
            that min_tokens must suppress, stop ids included. seed: of its draws. features: parts of the prompt that are
            no text. pooling: what to make of the hidden states. token_types: of each token, or None for zeros.
    """

    slot: int
    request_id: str
    token_ids: npt.NDArray[np.int32]
    prompt_length: int
    params: SamplingParams
    eos_token_ids: Sequence[int]
    seed: int
    adapter: str = ""
    bad_words: Sequence[list[int]] = ()
    prompt_scored: bool = False
    processors: Sequence[str] = ()
    features: Sequence[Feature] = ()
    pooling: PoolingParams | None = None
    token_types: Sequence[int] | None = None


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step.

    Args:
        step_id: counts up.
        slots: [B]; sequences with one new token first.
        starts: [B] position of each sequence's first new token (= tokens computed before).
        counts: [B] new tokens of each sequence, drafts included.
        samples: [B] whether the sequence's last new token ends what is known, so that the next token is sampled.
        new: sequences that take a slot.
        released: slots that were given up since the last plan; told before ``new``.
        blocks: per cache group (slots, index in the block table, block ids): entries to write before the step.
        drafts: [B, K] draft ids verified in this step, -1 behind the last; None without speculation.
        num_drafts: [B] drafts of each sequence. draft_parents: [B, K] index of each draft's parent among them, -1 for
            the token before them; None where each follows the one before.
        draft_limits: [B] most drafts to propose for each sequence after this step; None: as many as there may be.
        ahead: the round before this one is not accounted: only the device knows its drafts and where sequences stand;
            ``starts`` are upper bounds, and ``drafts`` say nothing.
        unseen: [B] sequences that the drafter need not be shown any more; None: it sees all.
    """

    step_id: int
    slots: IntArray
    starts: IntArray
    counts: IntArray
    samples: BoolArray
    new: list[NewSequence] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    blocks: list[tuple[IntArray, IntArray, IntArray]] = field(default_factory=list)
    drafts: IntArray | None = None
    num_drafts: IntArray | None = None
    draft_parents: IntArray | None = None
    draft_limits: IntArray | None = None
    ahead: bool = False
    unseen: BoolArray | None = None

    @property
    def is_round(self) -> bool:
        """Whether it is a round of speculation: each sequence brings its last known token and its drafts, in chains."""
        if self.num_drafts is None or self.draft_parents is not None or not len(self.slots):
            return False
        return bool(self.samples.all()) and bool((self.counts == 1 + self.num_drafts).all())

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return int(self.counts.sum())


@dataclass(slots=True)
class SamplerOutput:
    """Tokens of one step.

    Args:
        token_ids: [R, 1 + K] sampled ids of the rows with ``samples``, -1 behind the last that counts (drafts that
            were refused).
        logprobs: per row and token, or None when nobody asked.
    """

    token_ids: Any
    logprobs: list[list[TokenLogprobs] | None] | None = None


@dataclass(slots=True)
class ModelRunnerOutput:
    """The result of one step. ``next_drafts`` [R, K] are proposals for the following step, or None; ``next_parents``
    [R, K] the parents of those that branch, or None.
    ``prompt_logprobs`` are scores of prompt tokens by slot, in order over the steps of a prompt. ``failures`` are slots
    whose requests cannot go on, with the reasons; what was sampled for them counts for nothing. ``pooled`` are results
    of pooling by slot. ``draft_seconds`` is the time that the drafter took.
    """

    step_id: int
    sampled: SamplerOutput
    next_drafts: IntArray | None = None
    next_parents: IntArray | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    failures: dict[int, str] | None = None
    pooled: dict[int, PooledResult] | None = None
    draft_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Recordings:
    """What a worker recorded of steps with drafts, and of those without.

    Args:
        decodes, rounds: seconds of a recorded decode step, and of a recorded round of speculation, by the number of
            sequences; empty where rounds are not recorded. drafts: whether rounds draft, too. followed: whether the
            drafter must see all that the target computes, which recorded decode steps do not show.
    """

    decodes: Mapping[int, float] = field(default_factory=dict)
    rounds: Mapping[int, float] = field(default_factory=dict)
    drafts: bool = False
    followed: bool = False
