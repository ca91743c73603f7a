"""What two vocabularies have in common: tokens that stand for the same bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jackfield.tokenizer.pieces import DecoderStyle
from jackfield.tokenizer.wrapper import Tokenizer

Key = tuple[str, bytes]


def ids_in(target: Tokenizer, draft: Tokenizer, size: int) -> npt.NDArray[np.int32] | None:
    """Return for each of ``size`` ids of ``draft`` the id of the same token in ``target``, or -1; None where all tokens
    that either has are the same in both.

    Tokens are the same where they stand for the same bytes; special tokens where they are spelled alike.
    """
    known = {key: number for number, key in reversed(list(enumerate(_keys(target)))) if key is not None}
    mine = _keys(draft)
    found = np.full(size, -1, dtype=np.int32)
    for number, key in enumerate(mine[:size]):
        if key is not None:
            found[number] = known.get(key, -1)
    count = min(target.vocab_size, draft.vocab_size, size)
    same = bool((found[:count] == np.arange(count)).all()) and bool((found[count:] == -1).all())
    return None if same else found


def _keys(tokenizer: Tokenizer) -> list[Key | None]:
    """Return what each id stands for; None for ids without a token."""
    pieces, special = tokenizer.pieces, tokenizer.special_ids
    words = {number: word for word, number in tokenizer.hf.get_vocab().items()}
    keys: list[Key | None] = []
    for number in range(max(words, default=-1) + 1):
        if number not in words:
            keys.append(None)
        elif number in special:
            keys.append(("special", words[number].encode()))
        elif pieces.style is DecoderStyle.BYTE_LEVEL:
            keys.append(("text", pieces.bytes_of(number)))
        elif pieces.style is DecoderStyle.OTHER:
            keys.append(("text", words[number].encode()))
        else:
            piece = pieces.spm_of(number)
            keys.append(("text", piece if isinstance(piece, bytes) else piece.encode()))
    return keys
