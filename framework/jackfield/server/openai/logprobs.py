"""Log probabilities as OpenAI's API writes them: the form of chat and the older one of text completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.engine.outputs import CompletionOutput, Logprob
from jackfield.protocol import SamplingParams
from jackfield.tokenizer import IncrementalDetokenizer, Tokenizer
from jackfield.tokenizer.pieces import DecoderStyle

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""

Entry = Mapping[int, Logprob]
"""Log probabilities at one place by token id, the token of the text first."""


class TokenWriter:
    """Writes single tokens.

    Args:
        tokenizer: of the model. as_ids: write ``token_id:N`` instead of texts. skip_special: special tokens are no part
            of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()

    def name(self, token: int) -> str:
        """Return a token's text; bytes that are no characters become U+FFFD."""
        return f"token_id:{token}" if self._as_ids else self._raw(token).decode("utf-8", "replace")

    def key(self, token: int) -> str:
        """Return a token's text for use as a key: bytes that are no characters are spelled out."""
        if self._as_ids:
            return f"token_id:{token}"
        raw = self._raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def values(self, token: int) -> list[int] | None:
        """Return what a token adds to the bytes of the text; None for tokens that are no part of it."""
        return None if token in self._hidden else list(self._raw(token))

    def _raw(self, token: int) -> bytes:
        pieces = self._tokenizer.pieces
        if pieces.style is DecoderStyle.BYTE_LEVEL:
            return pieces.bytes_of(token)
        if pieces.style is DecoderStyle.OTHER:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        piece = pieces.spm_of(token)
        return piece if isinstance(piece, bytes) else piece.encode()


def visible(output: CompletionOutput, params: SamplingParams, *, all_tokens: bool) -> tuple[list[int], list[Entry]]:
    """Return the tokens of a completion that have log probabilities, and these.

    The token that ended the text without being part of it is left out, unless ``all_tokens``.
    """
    ids = output.token_ids
    entries: list[Entry] = list(output.logprobs or ())
    by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
    shown = params.include_stop_str_in_output or not params.skip_special_tokens
    if by_token and ids and not shown and not all_tokens:
        return ids[:-1], entries[:-1]
    return ids, entries


def top(entry: Entry, count: int) -> list[tuple[int, Logprob]]:
    """Return the ``count`` most likely tokens, the most likely first."""
    ranked = [(token, value) for token, value in entry.items() if value.rank is not None and value.rank <= count]
    return sorted(ranked, key=lambda pair: pair[1].rank or 0)[:count]


def number(value: Logprob) -> float:
    """Return a log probability that JSON can hold."""
    return max(value.logprob, LEAST)


def chat_logprobs(writer: TokenWriter, ids: Sequence[int], entries: Sequence[Entry], count: int) -> dict[str, Any]:
    """Return the ``logprobs`` of a choice in chat."""

    def one(token: int, value: Logprob) -> dict[str, Any]:
        return {"token": writer.name(token), "logprob": number(value), "bytes": writer.values(token)}

    content = [
        {**one(token, entry[token]), "top_logprobs": [one(other, value) for other, value in top(entry, count)]}
        for token, entry in zip(ids, entries, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[Entry | None], count: int) -> list[dict[str, Any] | None]:
    """Return log probabilities of a prompt: for each token a map from ids, the token's own first."""
    return [None if entry is None else _prompt_entry(entry, count) for entry in entries]


def _prompt_entry(entry: Entry, count: int) -> dict[str, Any]:
    own = next(iter(entry))
    kept = {own: entry[own], **dict(top(entry, count))}
    return {
        str(token): {"logprob": number(value), "rank": value.rank, "decoded_token": value.decoded_token}
        for token, value in kept.items()
    }


class TextLogprobs:
    """The older form: texts of tokens that add up to the text, and where each begins.

    Args:
        tokenizer: of the model. writer: writes the keys of ``top_logprobs``. count: of likely tokens at each place.
        params: decide which tokens are part of the text. prompt_ids: what the text goes on from.
        as_ids: write tokens as ``token_id:N``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        writer: TokenWriter,
        count: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        as_ids: bool,
    ) -> None:
        self._writer, self._count, self._as_ids = writer, count, as_ids
        self._offset = 0
        self._text = IncrementalDetokenizer(
            tokenizer, prompt_ids, params.skip_special_tokens, params.spaces_between_special_tokens
        )

    def prompt(self, ids: Sequence[int], texts: Sequence[str], entries: Sequence[Entry | None]) -> dict[str, Any]:
        """Return the part of an echoed prompt; must come before all others."""
        return self._write(ids, texts, entries)

    def output(self, ids: Sequence[int], entries: Sequence[Entry], *, last: bool) -> dict[str, Any]:
        """Return the part of new tokens. ``last`` gives out broken characters at the end of the text."""
        texts = [self._text.push([token]) for token in ids]
        if last and texts:
            texts[-1] += self._text.flush()
        return self._write(ids, texts, entries)

    def _write(self, ids: Sequence[int], texts: Sequence[str], entries: Sequence[Entry | None]) -> dict[str, Any]:
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": [self._writer.name(token) for token in ids] if self._as_ids else list(texts),
            "token_logprobs": [
                None if entry is None else number(entry[token]) for token, entry in zip(ids, entries, strict=True)
            ],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: Entry) -> dict[str, float]:
        own = next(iter(entry))
        kept = {own: entry[own], **dict(top(entry, self._count))}
        return {self._writer.key(token): number(value) for token, value in kept.items()}


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return parts of the older form as one."""
    return {key: [item for part in parts for item in part[key]] for key in parts[0]}


def echo_texts(tokenizer: Tokenizer, ids: Sequence[int], text: str | None, *, skip_special: bool) -> list[str]:
    """Return the texts of a prompt's tokens, which add up to the echoed prompt.

    Args:
        ids: of the prompt. text: as it was given, or None for a prompt of ids. skip_special: leave special tokens of
            a prompt of ids out; in a text they stay as they were written.
    """
    stream = IncrementalDetokenizer(tokenizer, (), skip_special and text is None)
    texts = [stream.push([token]) for token in ids]
    texts[-1] += stream.flush()
    if text is None:
        return texts
    # Tokens that the tokenizer put around the text are no part of it.
    if ids[0] in tokenizer.special_ids and not text.startswith(texts[0]):
        texts[0] = ""
    if len(ids) > 1 and ids[-1] in tokenizer.special_ids and not text.endswith(texts[-1]):
        texts[-1] = ""
    return texts
