"""Turns a growing list of ids into text, piece by piece.

What the pieces add up to, whatever the grouping into steps:

- byte-level BPE: ``decode(output ids)``;
- SentencePiece with byte fallback: the text that the output adds behind a prompt, that is ``decode(prompt + output)``
  without ``decode(prompt)`` when the prompt ends with a whole token; only without a prompt does the space at the start
  of a text go;
- other tokenizers: ``decode(context + output)`` without ``decode(context)``, where the context is the end of the
  prompt, as long as the text holds no broken characters.

The cost of a token does not grow with the length of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from jackfield.tokenizer.pieces import DecoderStyle, PieceTable
from jackfield.tokenizer.wrapper import Tokenizer

_CONTEXT = 6
"""Tokens of the prompt that decide how the first token of the output is written."""
_LONGEST_CHARACTER = 16
"""Tokens after which text that still ends with a broken character is given out as it is."""


class _Stream(Protocol):
    def push(self, number: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """The text of one sequence.

    Args:
        tokenizer: the tokenizer.
        prompt_ids: what comes before; its text is never given out.
        skip_special_tokens: leave special tokens out.
        spaces_between_special_tokens: False drops the space that some decoders put between two neighbouring added
            tokens. Byte-level and SentencePiece decoders put none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        visible = (number for number in reversed(prompt_ids) if number not in self._skip)
        context = [number for number, _ in zip(visible, range(_CONTEXT), strict=False)][::-1]
        self._stream = _make_stream(tokenizer, context, joined=not spaces_between_special_tokens)

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete. Characters whose bytes are not all there wait."""
        return "".join([self._stream.push(number) for number in ids if number not in self._skip])

    def flush(self) -> str:
        """Return what waits, broken characters as U+FFFD. Nothing may be pushed after it."""
        return self._stream.flush()


def _make_stream(tokenizer: Tokenizer, context: list[int], *, joined: bool) -> _Stream:
    pieces = tokenizer.pieces
    if pieces.style is DecoderStyle.BYTE_LEVEL:
        return _ByteLevelStream(pieces)
    if pieces.style is DecoderStyle.OTHER:
        return _WindowStream(tokenizer, context, joined=joined)
    return _SpmStream(pieces, strip=pieces.style is DecoderStyle.SPM_STRIP and not context)


class _ByteLevelStream:
    def __init__(self, pieces: PieceTable) -> None:
        self._bytes_of = pieces.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, number: int) -> str:
        return self._decoder.decode(self._bytes_of(number))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _SpmStream:
    """A run of byte tokens is text as a whole or broken as a whole, so that it waits for its end."""

    def __init__(self, pieces: PieceTable, *, strip: bool) -> None:
        self._piece_of = pieces.spm_of
        self._run = bytearray()
        self._strip = strip

    def push(self, number: int) -> str:
        piece = self._piece_of(number)
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self._out(self._end_run() + piece) if piece else ""

    def flush(self) -> str:
        return self._out(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _out(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _WindowStream:
    """Decodes a few tokens with the next one and without it, and gives out the difference."""

    def __init__(self, tokenizer: Tokenizer, context: list[int], *, joined: bool) -> None:
        self._tokenizer = tokenizer
        self._window = list(context)
        self._before = self._decode(self._window)
        self._waiting = 0
        self._joined = joined
        self._after_added = False

    def push(self, number: int) -> str:
        self._window.append(number)
        self._waiting += 1
        text = self._decode(self._window)
        if text.endswith("\ufffd") and self._waiting < _LONGEST_CHARACTER:
            return ""
        return self._join(number, self._advance(text))

    def flush(self) -> str:
        return self._advance(self._decode(self._window)) if self._waiting else ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _advance(self, text: str) -> str:
        new = text[len(self._before) :]
        self._window = self._window[-max(self._waiting, 1) :]
        self._before = self._decode(self._window)
        self._waiting = 0
        return new

    def _join(self, number: int, text: str) -> str:
        added = number in self._tokenizer.added_ids
        both, self._after_added = added and self._after_added, added
        return text.removeprefix(" ") if self._joined and both else text
