"""InputProcessor: from what a caller writes to requests of the engine core. Everything wrong with a request is found
here.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jackfield.errors import RequestError, did_you_mean
from jackfield.interfaces import LogitsProcessor
from jackfield.protocol import EngineCoreRequest, SamplingParams
from jackfield.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or ``{"prompt": text}`` or ``{"prompt_token_ids": ids}`` with optional ``cache_salt``."""

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class ProcessorLimits:
    """Sizes that requests must fit.

    Args:
        vocab_size: of the model. max_model_len: prompt and output. eos_token_ids: of the model. seed: base for requests
            without a seed; None draws fresh ones. processors: active logits processors.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    seed: int | None = None
    processors: tuple[type[LogitsProcessor], ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt after tokenization."""

    text: str | None
    ids: list[int]
    cache_salt: str = ""


class InputProcessor:
    """Checks and tokenizes.

    Args:
        tokenizer: or None when the engine runs on token ids alone.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: ProcessorLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._arrivals = itertools.count()

    @property
    def end_ids(self) -> frozenset[int]:
        """The model's end-of-sequence ids."""
        return frozenset(self._limits.eos_token_ids)

    def prompt(self, prompt: Prompt) -> ProcessedPrompt:
        """Return a prompt's token ids.

        Raises:
            RequestError: it is empty, malformed, too long, or has ids outside the vocabulary.
        """
        salt = ""
        if isinstance(prompt, Mapping):
            prompt, salt = _unpack(prompt)
        if isinstance(prompt, str):
            text, ids = prompt, self._encode(prompt)
        else:
            text, ids = None, self._check_ids(prompt)
        self._check_length(ids)
        return ProcessedPrompt(text, ids, salt)

    def requests(
        self, request_id: str, prompt: ProcessedPrompt, params: SamplingParams, priority: int = 0
    ) -> list[EngineCoreRequest]:
        """Return ``n`` core requests for a prompt. With ``n`` above 1 their ids are ``ID/0``, ``ID/1`` ...

        Raises:
            RequestError: a parameter cannot be honoured.
        """
        self._check_params(params)
        room = self._limits.max_model_len - len(prompt.ids)
        seed, processors = self._seed(params), self._processors(params)
        made = []
        for index in range(params.n):
            made.append(
                EngineCoreRequest(
                    request_id=request_id if params.n == 1 else f"{request_id}/{index}",
                    prompt_token_ids=prompt.ids,
                    sampling_params=params,
                    eos_token_ids=[] if params.ignore_eos else list(self._limits.eos_token_ids),
                    max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                    seed=_fold(seed + index),
                    priority=priority,
                    arrival=next(self._arrivals),
                    cache_salt=prompt.cache_salt,
                    bad_words=self._bad_words(params),
                    processors=processors,
                )
            )
        return made

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(
                "the engine was started without a tokenizer",
                field="prompt",
                value=text,
                remedy="send prompt_token_ids, or start the engine with a tokenizer",
            )
        # A token is at most a few dozen bytes; a text far beyond that cannot fit and need not be tokenized to know it.
        if len(text) > 512 * self._limits.max_model_len:
            raise _too_long(f"{len(text)} characters", self._limits.max_model_len)
        return self._tokenizer.encode(text)

    def _check_ids(self, ids: Any) -> list[int]:
        good = isinstance(ids, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if not good:
            raise RequestError(
                "a prompt must be a text or a list of token ids",
                field="prompt",
                value=ids,
                remedy="pass a str, a list of int, or {'prompt': ...} or {'prompt_token_ids': ...}",
            )
        outside = [i for i in ids if not 0 <= i < self._limits.vocab_size]
        if outside:
            raise RequestError(
                "the prompt has token ids outside the vocabulary",
                field="prompt_token_ids",
                value=outside[:8],
                remedy=f"use ids from 0 to {self._limits.vocab_size - 1}",
            )
        return list(ids)

    def _check_length(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty", field="prompt", value="", remedy="send at least one token")
        if len(ids) >= self._limits.max_model_len:
            raise _too_long(f"{len(ids)} tokens", self._limits.max_model_len)

    def _check_params(self, params: SamplingParams) -> None:
        if self._tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(
                "stop strings and bad words need a tokenizer",
                field="sampling_params.stop",
                value=params.stop or params.bad_words,
                remedy="use stop_token_ids, or start the engine with a tokenizer",
            )
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            outside = [i for i in getattr(params, name) or () if i >= self._limits.vocab_size]
            if outside:
                raise RequestError(
                    f"{name} has token ids outside the vocabulary",
                    field=f"sampling_params.{name}",
                    value=outside[:8],
                    remedy=f"use ids from 0 to {self._limits.vocab_size - 1}",
                )

    def _processors(self, params: SamplingParams) -> list[str]:
        """Return the logits processors that want a request; none when it is greedy and none can change its tokens."""
        wanted = [processor for processor in self._limits.processors if _wants(processor, params)]
        if params.is_greedy and all(processor.argmax_invariant for processor in wanted):
            return []
        return [processor.name for processor in wanted]

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        if self._limits.seed is None:
            return secrets.randbits(63)
        return _fold(self._limits.seed * 0x9E3779B97F4A7C15 + next(self._arrivals))

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return each bad word's tokens, at the start of a text and behind a space."""
        if not params.bad_words or self._tokenizer is None:
            return []
        found: list[list[int]] = []
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found


def _wants(processor: type[LogitsProcessor], params: SamplingParams) -> bool:
    try:
        return bool(processor.wants(params))
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"logits processor '{processor.name}' cannot tell whether it wants the request: "
            f"{type(error).__name__}: {error}",
            field="sampling_params.extra_args",
            value=params.extra_args,
            remedy="correct extra_args, or report it to the plugin's owner",
        ) from error


def _unpack(prompt: Mapping[str, Any]) -> tuple[Any, str]:
    unknown = [key for key in prompt if key not in PROMPT_KEYS]
    given = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
    if unknown or len(given) != 1:
        hint = did_you_mean(unknown[0], PROMPT_KEYS) if unknown else ""
        raise RequestError(
            "a prompt object needs exactly one of 'prompt' and 'prompt_token_ids', and nothing unknown",
            field="prompt",
            value=sorted(prompt),
            remedy=hint or f"known keys: {', '.join(PROMPT_KEYS)}",
        )
    return prompt[given[0]], str(prompt.get("cache_salt") or "")


def _too_long(size: str, limit: int) -> RequestError:
    return RequestError(
        f"the prompt has {size}, but the context holds {limit} tokens with at least one of output",
        field="prompt",
        value=size,
        remedy=f"shorten the prompt to {limit - 1} tokens or less, or raise max_model_len",
    )


def _fold(seed: int) -> int:
    """Return ``seed`` as a signed 64-bit number."""
    return (seed + 2**63) % 2**64 - 2**63
