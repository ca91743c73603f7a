"""What single tokens contribute to a text, for the two families of decoders in which that is known exactly."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_SPM_STEPS = [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class DecoderStyle(Enum):
    """How a tokenizer joins tokens to text."""

    BYTE_LEVEL = "byte_level"
    """Characters of tokens stand for bytes (GPT-2)."""
    SPM = "spm"
    """U+2581 stands for a space, and ``<0xNN>`` tokens for bytes."""
    SPM_STRIP = "spm_strip"
    """The same, and one space at the start of a text is dropped."""
    OTHER = "other"


def decoder_style(state: Mapping[str, Any] | None) -> DecoderStyle:
    """Return the style of a decoder of the tokenizers library, given its json."""
    if state is None:
        return DecoderStyle.OTHER
    if state.get("type") == "ByteLevel":
        return DecoderStyle.BYTE_LEVEL
    steps = state.get("decoders") if state.get("type") == "Sequence" else None
    if steps and len(steps) == 1:
        return decoder_style(steps[0])
    if steps == _SPM_STEPS:
        return DecoderStyle.SPM
    return DecoderStyle.SPM_STRIP if steps == [*_SPM_STEPS, _STRIP] else DecoderStyle.OTHER


def byte_characters() -> dict[str, int]:
    """Return the characters that byte-level BPE writes bytes with (GPT-2): printable Latin-1 for itself, the other
    bytes in order from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class PieceTable:
    """Pieces by id, made when first asked for.

    Args:
        token_of: returns the token of an id, or None for ids without one.
        style: how tokens are joined.
    """

    def __init__(self, token_of: Callable[[int], str | None], style: DecoderStyle) -> None:
        self.style = style
        self._token_of = token_of
        self._bytes: dict[int, bytes] = {}
        self._spm: dict[int, bytes | str] = {}
        self._characters = byte_characters()

    def bytes_of(self, number: int) -> bytes:
        """Return the bytes of a byte-level token; empty for ids without a token."""
        piece = self._bytes.get(number)
        if piece is None:
            piece = self._bytes[number] = self._to_bytes(self._token_of(number) or "")
        return piece

    def _to_bytes(self, token: str) -> bytes:
        try:
            return bytes(self._characters[char] for char in token)
        except KeyError:  # an added token, which stands for itself
            return token.encode("utf-8", errors="replace")

    def spm_of(self, number: int) -> bytes | str:
        """Return one byte for a byte token, and else the text of a SentencePiece token."""
        piece = self._spm.get(number)
        if piece is None:
            piece = self._spm[number] = _spm_piece(self._token_of(number) or "")
        return piece


def _spm_piece(token: str) -> bytes | str:
    match = _BYTE_TOKEN.fullmatch(token)
    if match is not None:
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ")
