"""The engine's view of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from jackfield.errors import RequestError
from jackfield.tokenizer.pieces import PieceTable, decoder_style

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]

_REFUSALS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError)
"""What the expressions of a template may raise."""


class Tokenizer:
    """Text to ids and back, special tokens, and the chat template.

    Args:
        hf: the tokenizer of transformers that does the work.
        eos_token_ids: ids that end a generation, besides the tokenizer's own EOS.
    """

    def __init__(self, hf: PreTrainedTokenizerFast, eos_token_ids: Iterable[int] = ()) -> None:
        self._hf = hf
        own = hf.eos_token_id
        self._eos = frozenset(eos_token_ids) | ({own} if own is not None else set())

    @property
    def hf(self) -> PreTrainedTokenizerFast:
        """The tokenizer of transformers."""
        return self._hf

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder."""
        self._hf.save_pretrained(str(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``. Special tokens that are spelled out in it become their ids."""
        ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_pair(
        self,
        text: str,
        pair: str,
        add_special_tokens: bool = True,
        *,
        keep: int | None = None,
        keep_pair: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """Return the ids of two texts that are read together, and which of them each id belongs to (0 or 1).

        Args:
            text, pair: the texts. add_special_tokens: put the model's own between and around them. keep: most ids in
                all; the second text is cut first. keep_pair: most ids of the second text.
        """
        first, second = (self._hf(one, add_special_tokens=False).encodings[0] for one in (text, pair))
        if keep_pair is not None:
            second.truncate(keep_pair)
        if keep is not None:
            special = self._hf.num_special_tokens_to_add(pair=True) if add_special_tokens else 0
            first.truncate(max(keep - special, 0))
            second.truncate(max(keep - special - len(first), 0))
        made = self._hf.backend_tokenizer.post_process(first, second, add_special_tokens)
        return made.ids, made.type_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``. Bytes that are no UTF-8 become U+FFFD; ids without a token become nothing."""
        text: str = self._hf.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows."""
        return len(self._hf)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text."""
        number: int | None = self._hf.bos_token_id
        return number

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation: end of text, of turn and of message, and those of the generation config."""
        return self._eos

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out."""
        return frozenset(number for number, token in self._hf.added_tokens_decoder.items() if token.special)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids that are matched in text before anything else; special or not."""
        return frozenset(self._hf.added_tokens_decoder)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of conversations, or None when the model has none."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return template or None

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        *,
        tokenize: Literal[False] = ...,
        **kwargs: Any,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        *,
        tokenize: Literal[True],
        **kwargs: Any,
    ) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """Return the prompt of a conversation, rendered in transformers' sandbox.

        Args:
            messages: objects with ``role`` and ``content`` and whatever else the template reads.
            add_generation_prompt: whether the prompt ends with the head of the assistant's turn.
            tools: json schemas of functions.
            tokenize: return ids. The template writes special tokens itself, so none are added.
            **kwargs: further variables of the template; ``chat_template`` replaces the model's own.

        Raises:
            RequestError: the model has no template, or the template does not accept the conversation.
        """
        if self.chat_template is None and self._hf.chat_template is None and "chat_template" not in kwargs:
            raise RequestError(
                "the model has no chat template",
                field="chat_template",
                value=None,
                remedy="give one with the request, or send a plain prompt",
            )
        text = self._render(list(messages), add_generation_prompt, list(tools) if tools else None, kwargs)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _render(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        tools: list[Mapping[str, Any]] | None,
        variables: dict[str, Any],
    ) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._hf.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
            )
        except (TemplateError, *_REFUSALS) as error:
            raise RequestError(
                f"the chat template does not accept this conversation: {error}",
                field="messages",
                value=messages,
                remedy="check roles, their order and the content of the messages",
            ) from error
        return text

    @cached_property
    def pieces(self) -> PieceTable:
        """The pieces that tokens decode to, for incremental decoding."""
        backend = self._hf.backend_tokenizer
        decoder = backend.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else None
        return PieceTable(backend.id_to_token, decoder_style(state))
