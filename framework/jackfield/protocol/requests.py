"""What goes into the engine core and what comes out."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from jackfield.interfaces import CacheEvent
from jackfield.protocol.pooling_params import PoolingParams
from jackfield.protocol.sampling_params import SamplingParams


class FinishReason(IntEnum):
    """Why a request ended. The text form is :attr:`text`."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    @property
    def text(self) -> str:
        """The word that clients see."""
        return self.name.lower()


class Feature(msgspec.Struct, kw_only=True, gc=False):
    """Part of a prompt that is no text: an image, a sound, given embeddings.

    Args:
        position: index of its first placeholder among the prompt's tokens. length: placeholders.
        hash: of its content; part of the prefix key. embeddings: little-endian float32 [length, E], or empty when an
            encoder makes them.
    """

    position: int
    length: int
    hash: bytes
    embeddings: bytes = b""


class EngineCoreRequest(msgspec.Struct, kw_only=True, gc=False):
    """One sequence to generate.

    Args:
        request_id: unique among living requests.
        prompt_token_ids: at least one id, all inside the vocabulary.
        sampling_params: of this sequence; ``n`` was unrolled into several requests before.
        eos_token_ids: the model's end ids that count for this request (empty with ignore_eos).
        max_tokens: resolved against the context length.
        seed: resolved: always a number.
        priority: smaller runs earlier under the priority policy.
        arrival: sequence number that breaks ties.
        cache_salt: separates prefix-cache entries of different tenants.
        adapter: name of a weight adapter, or "".
        features: parts of the prompt that are no text. encoder_tokens: length of the encoder's output that cross
            attention keeps. bad_words: token sequences that must not be completed.
        processors: names of the logits processors that want this request. pooling: what to make of the hidden states,
            for engines that make vectors, method resolved; max_tokens is 1 then. token_types: which text of a pair each
            token belongs to, or None: all to the first.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    max_tokens: int
    seed: int
    priority: int = 0
    arrival: int = 0
    cache_salt: str = ""
    adapter: str = ""
    features: list[Feature] | None = None
    encoder_tokens: int = 0
    bad_words: list[list[int]] = []
    processors: list[str] = []
    pooling: PoolingParams | None = None
    token_types: list[int] | None = None


class PooledResult(msgspec.Struct, gc=False):
    """A result of pooling: little-endian float32 numbers, and their shape."""

    data: bytes
    shape: list[int]


class TokenLogprobs(msgspec.Struct, gc=False):
    """Log probabilities of one position: the chosen token first, then the most likely ones. ``rank`` (from 1) is
    the chosen token's.
    """

    token_ids: list[int]
    values: list[float]
    rank: int


class CoreEvent(msgspec.Struct, gc=False):
    """What happened to one request in a step.

    Args:
        request_id: whose. token_ids: new tokens, in order. finish: why it ended, or None. stop_reason: the stop token
            id, "repetition", or None.
        logprobs: one entry per new token, or None. prompt_logprobs: one
            entry for each prompt token but the first, with the first output token. cached_tokens: prompt tokens found
            in the prefix cache. error:
            text of an error that ended it. pooled: the result of a pooling request. scheduled: when
            it was given its first tokens (seconds of the system's monotonic clock), with the event that ends it.
            drafts: rounds of drafts, drafts verified and drafts kept, with the event that ends it.
    """

    request_id: str
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    error: str = ""
    pooled: PooledResult | None = None
    scheduled: float | None = None
    drafts: tuple[int, int, int] = (0, 0, 0)


class CoreCounters(msgspec.Struct, gc=False):
    """Totals since the engine started; they only grow.

    Args:
        preemptions: running requests that lost their place. prefix_queries, prefix_hits: prompt tokens looked up in the
            prefix cache, and found. drafts_proposed, drafts_accepted: draft tokens verified, and kept. draft_rounds:
            how often drafts of a sequence were verified. accepted_per_position: drafts kept by their place among the
            drafts, from the first.
    """

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    draft_rounds: int = 0
    accepted_per_position: list[int] = []


class EngineCoreOutput(msgspec.Struct):
    """All events of one step, in batch order, changes of the prefix cache, and counters for metrics. ``tokens`` were
    computed in it.
    """

    events: list[CoreEvent]
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    kv_events: list[CacheEvent] = []
    counters: CoreCounters | None = None
    tokens: int = 0
