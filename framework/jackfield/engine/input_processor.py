"""InputProcessor: from what a caller writes to requests of the engine core. Everything wrong with a request is found
here.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from jackfield.errors import RequestError, did_you_mean
from jackfield.interfaces import LogitsProcessor, PoolerConfig
from jackfield.protocol import EngineCoreRequest, Feature, PoolingParams, SamplingParams
from jackfield.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or ``{"prompt_embeds": [T, E]}`` (a tensor
or an array, one row for each token) with optional ``cache_salt``. Models that make vectors take two texts that are read
together, ``{"prompt": text, "text_pair": text}``, and ``token_type_ids`` beside ``prompt_token_ids``.
"""

CONTENT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")
BESIDE = {"text_pair": "prompt", "token_type_ids": "prompt_token_ids"}
"""Keys that stand beside another one."""
PROMPT_KEYS = (*CONTENT_KEYS, *BESIDE, "cache_salt")


@dataclass(frozen=True, slots=True)
class ProcessorLimits:
    """Sizes that requests must fit.

    Args:
        vocab_size: of the model. max_model_len: prompt and output. eos_token_ids: of the model. seed: base for requests
            without a seed; None draws fresh ones. processors: active logits processors. pooler: how hidden states
            become results, or None for an engine that generates. embedding_size: E of embeddings that the model takes
            as a prompt; 0: it takes none. hidden_size: of embeddings that it makes. token_types: rows of the model's
            table of them.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    seed: int | None = None
    processors: tuple[type[LogitsProcessor], ...] = ()
    pooler: PoolerConfig | None = None
    embedding_size: int = 0
    hidden_size: int = 0
    token_types: int = 0


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt after tokenization."""

    text: str | None
    ids: list[int]
    cache_salt: str = ""
    features: tuple[Feature, ...] = ()
    token_types: list[int] | None = None


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
    def limits(self) -> ProcessorLimits:
        """Sizes that requests must fit."""
        return self._limits

    @property
    def end_ids(self) -> frozenset[int]:
        """The model's end-of-sequence ids."""
        return frozenset(self._limits.eos_token_ids)

    def prompt(self, prompt: Prompt) -> ProcessedPrompt:
        """Return a prompt's token ids.

        Raises:
            RequestError: it is empty, malformed, too long, or has ids outside the vocabulary.
        """
        salt, types, pair = "", None, None
        if isinstance(prompt, Mapping):
            types, pair = prompt.get("token_type_ids"), prompt.get("text_pair")
            key, prompt, salt = _unpack(prompt)
            if key == "prompt_embeds":
                return self._embedded(prompt, salt)
        if pair is not None:
            return self._pair(prompt, pair, salt)
        if isinstance(prompt, str):
            text, ids = prompt, self._encode(prompt)
        else:
            text, ids = None, self._check_ids(prompt)
        self._check_length(ids)
        return ProcessedPrompt(text, ids, salt, token_types=self._check_types(types, len(ids)))

    def requests(
        self, request_id: str, prompt: ProcessedPrompt, params: SamplingParams, priority: int = 0
    ) -> list[EngineCoreRequest]:
        """Return ``n`` core requests for a prompt. With ``n`` above 1 their ids are ``ID/0``, ``ID/1`` ...

        Raises:
            RequestError: a parameter cannot be honoured.
        """
        if self._limits.pooler is not None:
            raise RequestError(
                "the engine makes vectors and generates no text",
                field="model.task",
                value="pool",
                remedy="use encode, embed, classify or score, or start it with task 'generate'",
            )
        self._check_params(params)
        self._check_embedded(prompt, params)
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
                    features=list(prompt.features) or None,
                )
            )
        return made

    def pooling_request(
        self, request_id: str, prompt: ProcessedPrompt, params: PoolingParams, priority: int = 0
    ) -> EngineCoreRequest:
        """Return the core request of a prompt whose hidden states are wanted.

        Raises:
            RequestError: the engine generates text, or the model cannot do what is asked.
        """
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt.ids,
            sampling_params=SamplingParams(detokenize=False),
            eos_token_ids=[],
            max_tokens=1,
            seed=0,
            priority=priority,
            arrival=next(self._arrivals),
            cache_salt=prompt.cache_salt,
            features=list(prompt.features) or None,
            pooling=self._resolve_pooling(params),
            token_types=prompt.token_types,
        )

    def _resolve_pooling(self, params: PoolingParams) -> PoolingParams:
        pooler = self._limits.pooler
        if pooler is None:
            raise RequestError(
                "the engine generates text and makes no vectors",
                field="model.task",
                value="generate",
                remedy="start it with task 'pool'",
            )
        if not params.makes_embeddings:
            _check_labels(params, pooler)
        width = _width(pooler, self._limits.hidden_size, per_token=params.per_token)
        if params.dimensions is not None and params.dimensions > width:
            raise RequestError(
                f"the model's embeddings have {width} dimensions",
                field="pooling_params.dimensions",
                value=params.dimensions,
                remedy=f"use a number from 1 to {width}",
            )
        return params if params.per_token else msgspec.structs.replace(params, method=params.method or pooler.method)

    def _pair(self, text: Any, pair: Any, salt: str) -> ProcessedPrompt:
        """Return two texts that are read together."""
        if self._limits.pooler is None or not (isinstance(text, str) and isinstance(pair, str)):
            raise RequestError(
                "two texts are read together by models that make vectors, and both must be texts",
                field="text_pair",
                value=pair,
                remedy="leave text_pair out" if self._limits.pooler is None else "send two texts",
            )
        for one in (text, pair):
            self._check_text(one)
        assert self._tokenizer is not None
        ids, types = self._tokenizer.encode_pair(text, pair)
        self._check_length(ids)
        return ProcessedPrompt(text, ids, salt, token_types=types if self._limits.token_types > 1 else None)

    def _check_types(self, types: Any, count: int) -> list[int] | None:
        if types is None:
            return None
        kinds = self._limits.token_types if self._limits.pooler is not None else 0
        known = set(range(kinds)) if kinds > 1 else set()
        if not isinstance(types, Sequence) or len(types) != count or not known.issuperset(types):
            raise RequestError(
                f"there must be one type from 0 to {kinds - 1} for each token" if known else "the model has no types",
                field="token_type_ids",
                value=types,
                remedy="correct token_type_ids" if known else "leave token_type_ids out",
            )
        return list(types)

    def _embedded(self, values: Any, salt: str) -> ProcessedPrompt:
        """Return a prompt of embeddings: placeholders, and the numbers as a feature."""
        width = self._limits.embedding_size
        array = _as_matrix(values)
        good = array is not None and array.shape[1] == width and np.isfinite(array).all()
        if not width or array is None or not good:
            shape = list(np.shape(values)) if width else "any"
            raise RequestError(
                f"prompt_embeds must be finite numbers [tokens, {width}]" if width else "the model takes no embeddings",
                field="prompt_embeds",
                value=shape,
                remedy="send a tensor or an array with one row for each token" if width else "send text or token ids",
            )
        ids = [0] * len(array)
        self._check_length(ids)
        data = array.tobytes()
        feature = Feature(position=0, length=len(ids), hash=hashlib.sha256(data).digest(), embeddings=data)
        return ProcessedPrompt(None, ids, salt, (feature,))

    def _check_embedded(self, prompt: ProcessedPrompt, params: SamplingParams) -> None:
        """Refuse what looks at the tokens of a prompt that has none."""
        asks = {
            "prompt_logprobs": params.prompt_logprobs,
            "repetition_penalty": params.repetition_penalty - 1.0 or None,
        }
        for name, value in asks.items():
            if prompt.features and value is not None:
                raise RequestError(
                    f"{name} needs the tokens of the prompt, and embeddings have none",
                    field=f"sampling_params.{name}",
                    value=getattr(params, name),
                    remedy=f"leave {name} out",
                )

    def _encode(self, text: str) -> list[int]:
        self._check_text(text)
        assert self._tokenizer is not None
        return self._tokenizer.encode(text)

    def _check_text(self, text: str) -> None:
        """Refuse a text that cannot be tokenized, or need not be to know that it is too long."""
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
        longest = self._limits.max_model_len - (self._limits.pooler is None)
        if len(ids) > longest:
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


def _unpack(prompt: Mapping[str, Any]) -> tuple[str, Any, str]:
    unknown = [key for key in prompt if key not in PROMPT_KEYS]
    given = [key for key in CONTENT_KEYS if prompt.get(key) is not None]
    if unknown or len(given) != 1:
        hint = did_you_mean(unknown[0], PROMPT_KEYS) if unknown else ""
        raise RequestError(
            "a prompt object needs exactly one of 'prompt', 'prompt_token_ids', 'prompt_embeds', and nothing unknown",
            field="prompt",
            value=sorted(prompt),
            remedy=hint or f"known keys: {', '.join(PROMPT_KEYS)}",
        )
    for key, owner in BESIDE.items():
        if prompt.get(key) is not None and given[0] != owner:
            raise RequestError(
                f"{key} stands beside {owner}", field=key, value=prompt[key], remedy=f"send {owner}, or leave {key} out"
            )
    return given[0], prompt[given[0]], str(prompt.get("cache_salt") or "")


def _as_matrix(values: Any) -> npt.NDArray[np.float32] | None:
    """Return little-endian float32 [T, E], or None when that is not what the values are."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    try:
        array = np.asarray(values, dtype="<f4")
    except (TypeError, ValueError):
        return None
    return np.ascontiguousarray(array) if array.ndim == 2 else None


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


def _check_labels(params: PoolingParams, pooler: PoolerConfig) -> None:
    """Refuse labels that the model does not have."""
    ids, known = params.returned_token_ids, pooler.labels or pooler.token_labels
    if not pooler.labels and (ids is None or not known):
        raise RequestError(
            "the model has no labels to score",
            field="pooling_params.task",
            value=params.task,
            remedy=f"use 'embed' or 'token_embed'{', or name tokens in returned_token_ids' if known else ''}",
        )
    wrong = [one for one in ids or () if one >= known]
    if wrong:
        raise RequestError(
            f"the model has {known} {'labels' if pooler.labels else 'tokens'}",
            field="pooling_params.returned_token_ids",
            value=wrong,
            remedy=f"use numbers below {known}",
        )


def _width(pooler: PoolerConfig, hidden_size: int, *, per_token: bool) -> int:
    """Return how many dimensions embeddings have: layers behind pooling are not for vectors of tokens."""
    pooled_only = bool(pooler.projections) and not any(one.per_token for one in pooler.projections)
    return hidden_size if per_token and pooled_only else pooler.size or hidden_size
