"""SentencePiece models as they are, by the sentencepiece library: normalization and all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jackfield.checkpoint.locate import read_json
from jackfield.errors import CheckpointError
from jackfield.tokenizer.detokenizer import IncrementalDetokenizer
from jackfield.tokenizer.pieces import DecoderStyle, PieceTable
from jackfield.tokenizer.wrapper import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer that cuts text as its SentencePiece model does. ``add_bos_token`` (true where it is not said) and
    ``add_eos_token`` of tokenizer_config.json say what is put around a text.

    Args:
        hf: transformers' tokenizer over the model, which knows added tokens and chat templates. stops: ids that end a
            generation, besides its own.
    """

    def __init__(self, hf: Any, stops: Iterable[int] = ()) -> None:
        super().__init__(hf, stops)
        said, bos, eos = hf.init_kwargs, hf.bos_token_id, hf.eos_token_id
        self._before = [bos] if bos is not None and said.get("add_bos_token", True) else []
        self._after = [eos] if eos is not None and said.get("add_eos_token", False) else []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See the base class."""
        ids = super().encode(text, add_special_tokens=False)
        return self._around(ids) if add_special_tokens else ids

    def encode_pair(
        self,
        text: str,
        pair: str,
        add_special_tokens: bool = True,
        *,
        keep: int | None = None,
        keep_pair: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """See the base class."""
        first, second = (self.encode(one, False) for one in (text, pair))
        second = second[:keep_pair]
        if keep is not None:
            room = keep - (2 * len(self._around([])) if add_special_tokens else 0)
            first = first[: max(room, 0)]
            second = second[: max(room - len(first), 0)]
        if add_special_tokens:
            first, second = self._around(first), self._around(second)
        return first + second, [0] * len(first) + [1] * len(second)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See the base class."""
        stream = IncrementalDetokenizer(self, (), skip_special_tokens)
        return stream.push(ids) + stream.flush()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """See the base class."""
        return super().special_ids | frozenset(self._hf.all_special_ids)

    @cached_property
    def pieces(self) -> PieceTable:
        """See the base class."""
        return PieceTable(self._token, DecoderStyle.SPM_STRIP)

    def _token(self, number: int) -> str | None:
        token: str | None = self._hf.convert_ids_to_tokens(number) if 0 <= number < self.vocab_size else None
        return token

    def _around(self, ids: list[int]) -> list[int]:
        return [*self._before, *ids, *self._after]


def load_sentencepiece(file: Path) -> Any:
    """Return transformers' tokenizer over a SentencePiece model.

    Raises:
        CheckpointError: the file is no such model.
    """
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    class Plain(SentencePieceBackend):  # type: ignore[misc]  # transformers is not typed
        vocab_files_names = {"vocab_file": file.name}

    special = _special(file, check_sentencepiece(file))
    try:
        return Plain.from_pretrained(str(file.parent), local_files_only=True, **special)
    except Exception as error:  # whatever the libraries raise
        raise _damaged(file, error) from error


def check_sentencepiece(file: Path) -> Any:
    """Return the sentencepiece library's reader of a model; raises CheckpointError where the file is no model."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(file))
    except Exception as error:  # RuntimeError and OSError by version
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> CheckpointError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError(
        f"{file.name} cannot be loaded: {lines[0][:300]}",
        field="path",
        value=str(file),
        remedy="the file is damaged or no SentencePiece model: fetch it again",
    )


def _special(file: Path, model: Any) -> dict[str, str]:
    """Return special tokens that the model has and tokenizer_config.json does not speak of."""
    config = file.parent / "tokenizer_config.json"
    said = read_json(config) if config.is_file() else {}
    ids = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    return {name: model.id_to_piece(number) for name, number in ids.items() if number >= 0 and name not in said}
