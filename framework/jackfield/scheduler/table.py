"""The state of running sequences as arrays by slot, so that a steady step touches no request one by one.

For one slot, in tokens:

    0 ............ prompt ............ confirmed ...... known ...... total
                                       |                |            the most it may ever have
                                       |                sampled, maybe still on the device
                                       seen by the host
    computed: tokens whose keys and values are in the cache or in a planned step; computed <= known
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jackfield.kv_cache import BlockHasher
from jackfield.protocol import EngineCoreRequest, NewSequence, RepetitionDetection
from jackfield.protocol.requests import TokenLogprobs

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class Sequence:
    """A request as the scheduler knows it, waiting or running.

    Args:
        request: as it came in. key: of the policy. hasher: of its blocks. output: tokens generated before a
            preemption. slot: while it runs, else -1.
        cached: prompt tokens found in the prefix cache at first admission. scheduled: time of that.
        preemptions: how often it lost its slot. draft_totals: rounds of drafts, drafts verified and drafts kept before.
        scores: log probabilities of prompt tokens, as far as they are known.
    """

    request: EngineCoreRequest
    key: tuple[float, ...]
    hasher: BlockHasher
    prompt: Ints
    output: list[int] = field(default_factory=list)
    slot: int = -1
    cached: int = -1
    scheduled: float | None = None
    preemptions: int = 0
    draft_totals: tuple[int, int, int] = (0, 0, 0)
    aborted: bool = False
    scores: list[TokenLogprobs] = field(default_factory=list)

    @property
    def wants_scores(self) -> bool:
        """Whether log probabilities of prompt tokens are wanted and not all known."""
        wanted = self.request.sampling_params.prompt_logprobs is not None
        return wanted and len(self.scores) < len(self.prompt) - 1

    @property
    def wants_whole(self) -> bool:
        """Whether the hidden states of all prompt tokens are wanted."""
        pooling = self.request.pooling
        return self.wants_scores or (pooling is not None and pooling.method != "last")

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens that are known."""
        return len(self.prompt) + len(self.output)

    def taking(self, slot: int, tokens: Ints) -> NewSequence:
        """Return what workers need to know when it takes a slot; ``tokens`` are all that are known."""
        request = self.request
        return NewSequence(
            slot=slot,
            request_id=request.request_id,
            token_ids=tokens,
            prompt_length=len(self.prompt),
            params=request.sampling_params,
            eos_token_ids=[*request.eos_token_ids, *(request.sampling_params.stop_token_ids or ())],
            seed=request.seed,
            adapter=request.adapter,
            bad_words=request.bad_words,
            prompt_scored=not self.wants_scores,
            processors=request.processors,
            features=request.features or (),
            pooling=request.pooling,
            token_types=request.token_types,
        )


class SlotTable:
    """Per-slot arrays."""

    def __init__(self, slots: int, max_length: int) -> None:
        self.tokens: Ints = np.zeros((slots, max_length + 1), dtype=np.int32)
        self.prompt: Ints = np.zeros(slots, dtype=np.int32)
        self.confirmed: Ints = np.zeros(slots, dtype=np.int32)
        self.known: Ints = np.zeros(slots, dtype=np.int32)
        self.computed: Ints = np.zeros(slots, dtype=np.int32)
        self.total: Ints = np.zeros(slots, dtype=np.int32)
        self.min_tokens: Ints = np.zeros(slots, dtype=np.int32)
        self.stops: Ints = np.full((slots, 1), -1, dtype=np.int32)
        self.alive: npt.NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)
        self.full_blocks: Ints = np.zeros(slots, dtype=np.int32)
        self.last_step: npt.NDArray[np.int64] = np.full(slots, -1, dtype=np.int64)
        self.drafts: Ints = np.full((slots, 0), -1, dtype=np.int32)
        self.draft_parents: Ints | None = None
        """Of drafts that branch; None before any did."""
        self.num_drafts: Ints = np.zeros(slots, dtype=np.int32)
        self.draft_totals: Ints = np.zeros((slots, 3), dtype=np.int32)
        """Rounds, drafts verified and drafts kept."""
        self.repetition: dict[int, RepetitionDetection] = {}
        """Slots whose output ends when it repeats itself."""

    def fill(self, slot: int, sequence: Sequence) -> None:
        """Take a sequence into a slot; nothing is computed yet."""
        request = sequence.request
        prompt = sequence.prompt
        count = sequence.num_tokens
        self.tokens[slot, : len(prompt)] = prompt
        self.tokens[slot, len(prompt) : count] = sequence.output
        self.prompt[slot] = len(prompt)
        self.confirmed[slot] = self.known[slot] = count
        self.computed[slot] = 0
        self.total[slot] = len(prompt) + request.max_tokens
        self.min_tokens[slot] = request.sampling_params.min_tokens
        self._set_stops(slot, [*request.eos_token_ids, *(request.sampling_params.stop_token_ids or ())])
        self.alive[slot] = True
        self.full_blocks[slot] = 0
        self.num_drafts[slot] = 0
        self.draft_totals[slot] = sequence.draft_totals
        self.repetition.pop(slot, None)
        if (wish := request.sampling_params.repetition_detection) is not None:
            self.repetition[slot] = wish

    def ensure_drafts(self, width: int) -> None:
        """Make room for ``width`` drafts a sequence."""
        if self.drafts.shape[1] < width:
            grown = np.full((len(self.drafts), width), -1, dtype=np.int32)
            grown[:, : self.drafts.shape[1]] = self.drafts
            self.drafts = grown

    def _set_stops(self, slot: int, ids: list[int]) -> None:
        width = self.stops.shape[1]
        if len(ids) > width:
            grown = np.full((len(self.stops), len(ids)), -1, dtype=np.int32)
            grown[:, :width] = self.stops
            self.stops = grown
        self.stops[slot] = -1
        self.stops[slot, : len(ids)] = ids
