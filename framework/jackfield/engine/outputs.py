"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class Logprob:
    """The log probability of one token: its value, its rank (from 1) where known, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Args:
        index: which of ``n``. text, token_ids: as the output kind says (all so far, or what is new).
        cumulative_logprob: sum over all tokens, when log probabilities were asked for. logprobs: one map per token.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``; None while it goes on.
        stop_reason: the stop string or stop token id that ended it, or ``repetition``; None for the model's own end.
        error: what went wrong, where finish_reason is ``error``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str = ""

    def finished(self) -> bool:
        """Return whether this completion is over."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds of the system's monotonic clock: arrival, first scheduled (known when the request
    has ended), first token, last token. And, known when it has ended, over all completions: how often drafts were
    verified, how many drafts those were, and how many of them were kept.
    """

    arrival: float
    first_token: float | None = None
    last_token: float | None = None
    scheduled: float | None = None
    draft_rounds: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: its prompt and completions.

    Args:
        request_id: as given or made up. prompt: text, or None when ids were given. num_cached_tokens: prompt tokens
            found in
            the prefix cache, known when the request has ended. prompt_logprobs: one map for each prompt token, None
            for the
            first; set when they were asked for. pooled: float32 result of a pooling request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    pooled: npt.NDArray[np.float32] | None = None


@dataclass(slots=True)
class PoolingOutput:
    """The result of a pooling request.

    Args:
        request_id: as given or made up. prompt_token_ids: the prompt. data: float32: [E] or [L] for tasks on prompts,
            [N, E] or [N, L] for tasks on tokens. num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    data: npt.NDArray[np.float32]
    num_cached_tokens: int = 0
