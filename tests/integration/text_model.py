"""A tokenizer of bytes for tiny models: every id below 256 is one byte, so that any text can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = "<end>"
EOS_ID = 256


def add_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files into a model folder."""
    vocab = {char: byte for byte, char in enumerate(byte_characters())}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([EOS])
    assert raw.token_to_id(EOS) == EOS_ID
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS).save_pretrained(folder)


def byte_characters() -> list[str]:
    """Return GPT-2's printable stand-in of each byte: itself where printable, else the next free one from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [stand_in[byte] for byte in range(256)]


def letters() -> list[int]:
    """Return the ids of a to z and of the space."""
    return [ord(" "), *range(ord("a"), ord("z") + 1)]


def text_of(ids: Sequence[int]) -> str:
    """Return the text of ids that are bytes."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
