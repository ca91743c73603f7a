"""Mistral's own tokenizers (tekken.json), by the mistral-common library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jackfield.errors import CheckpointError, RequestError
from jackfield.tokenizer.pieces import DecoderStyle, PieceTable
from jackfield.tokenizer.wrapper import Message, Tokenizer


class MistralTokenizer(Tokenizer):
    """A tokenizer of mistral-common. Conversations are put into tokens by the library, not by a template."""

    def encode_pair(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        """Refuse: these tokenizers know no pairs of texts."""
        raise RequestError(
            "this tokenizer cannot put two texts together",
            field="text_pair",
            value=type(self).__name__,
            remedy="use a model that was trained on pairs",
        )

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """See the base class."""
        return frozenset(self._hf.all_special_ids)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """See the base class."""
        return self.special_ids

    @property
    def chat_template(self) -> str | None:
        """A word for what the library does; there is no template."""
        return "mistral-common"

    def apply_chat_template(  # type: ignore[override]  # one signature for both overloads
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """See the base class; ``add_generation_prompt`` has no meaning here, and templates cannot be given."""
        if "chat_template" in kwargs:
            raise RequestError(
                "this model's conversations follow no template",
                field="chat_template",
                value=kwargs["chat_template"],
                remedy="leave it out",
            )
        try:
            found: str | list[int] = self._hf.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=tokenize, return_dict=False, **kwargs
            )
        except Exception as error:  # the library validates with errors of its own
            raise RequestError(
                f"the tokenizer does not accept this conversation: {error}",
                field="messages",
                value=messages,
                remedy="check roles, their order and the content of the messages",
            ) from error
        return found

    @cached_property
    def pieces(self) -> PieceTable:
        """See the base class; text is found by decoding, since tokens may be parts of characters."""
        return PieceTable(lambda number: self._hf.convert_ids_to_tokens(number), DecoderStyle.OTHER)


def load_mistral(folder: Path) -> Any:
    """Return the tokenizer of a folder; raises CheckpointError where the library cannot read it."""
    from transformers.tokenization_mistral_common import MistralCommonBackend

    try:
        return MistralCommonBackend.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever the library raises
        raise CheckpointError(
            f"the tokenizer cannot be loaded: {error}",
            field="path",
            value=str(folder),
            remedy="check tekken.json, or name another tokenizer",
        ) from error
