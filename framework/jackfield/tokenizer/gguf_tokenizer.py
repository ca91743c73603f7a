"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE (``gpt2``) and SentencePiece BPE (``llama``).

Source: the ``tokenizer.ggml`` keys of the GGUF specification. Token types: 1 normal, 2 unknown, 3 control,
4 user-defined, 5 unused, 6 byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield.errors import CheckpointError
from jackfield.tokenizer.pretokenizers import PreTokenizerSpec, build_pre_tokenizer, find_pre_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_KINDS = ("gpt2", "llama")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer keys of one GGUF file, checked.

    Args:
        path: the file, for errors. kind: ``gpt2`` or ``llama``. tokens: by id.
        types: token types by id. metadata: all keys of the file.
    """

    path: str
    kind: str
    tokens: list[str]
    types: list[int]
    metadata: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``tokenizer.ggml.KEY``."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def token_id(self, name: str) -> int | None:
        """Return the id that ``NAME_token_id`` holds, or None when it is absent.

        Raises:
            CheckpointError: it lies outside the vocabulary.
        """
        value = self.get(f"{name}_token_id")
        if value is not None and not (type(value) is int and 0 <= value < len(self.tokens)):
            raise _wrong(self.path, f"{name}_token_id", value, f"lies outside the vocabulary of {len(self.tokens)}")
        return value

    def token(self, name: str) -> str | None:
        """Return the token whose id ``NAME_token_id`` holds, or None."""
        number = self.token_id(name)
        return None if number is None else self.tokens[number]

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean key, or ``default`` when it is absent."""
        return bool(self.get(key, default))


def build_gguf_tokenizer(metadata: Mapping[str, Any], path: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a GGUF file describes.

    Args:
        metadata: all metadata keys, vocabulary included.
        path: the file, for errors.

    Raises:
        CheckpointError: there is no tokenizer in it, or one of an unknown kind, or its keys contradict each other.
    """
    from transformers import PreTrainedTokenizerFast

    vocabulary = read_vocabulary(metadata, path)
    spec = find_pre_tokenizer(vocabulary.get("pre", "default"), path) if vocabulary.kind == "gpt2" else None
    backend = _spm(vocabulary) if spec is None else _byte_level(vocabulary, spec)
    _add_tokens(backend, vocabulary)
    _add_ends(backend, vocabulary, add_bos=True if spec is None else spec.add_bos)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = {f"{name}_token": vocabulary.token(key) for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template"),
        **{name: token for name, token in tokens.items() if token is not None},
    )


def read_vocabulary(metadata: Mapping[str, Any], path: str) -> Vocabulary:
    """Return the checked tokenizer keys of a GGUF file; raises CheckpointError."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise CheckpointError(
            "the GGUF file holds no tokenizer",
            field="path",
            value=path,
            remedy="use a file that was converted with its tokenizer",
        )
    if kind not in _KINDS:
        raise _wrong(path, "model", kind, f"is a kind of tokenizer that is unknown; known are {', '.join(_KINDS)}")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise _wrong(path, "token_type", len(types), f"has not one entry for each of the {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        raise _wrong(path, "tokens", len(tokens), "holds tokens twice")
    return Vocabulary(path, kind, tokens, types, metadata)


def _byte_level(vocabulary: Vocabulary, spec: PreTokenizerSpec) -> Backend:
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=_merges(vocabulary, ids), ignore_merges=spec.ignore_merges))
    if spec.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = build_pre_tokenizer(spec)
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in vocabulary.get("merges") or ():
        # The first character may be a space in itself, so that the cut is looked for behind it.
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise _wrong(vocabulary.path, "merges", line, "has a merge of tokens that are not in the vocabulary")
        merges.append((left, right))
    return merges


def _spm(vocabulary: Vocabulary) -> Backend:
    from tokenizers import Tokenizer, decoders, normalizers

    prefix = vocabulary.flag("add_space_prefix", True)
    backend = Tokenizer(_spm_model(vocabulary))
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _spm_model(vocabulary: Vocabulary) -> BPE:
    from tokenizers import models

    scores = vocabulary.get("scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        found = None if scores is None else len(scores)
        raise _wrong(
            vocabulary.path, "scores", found, f"must hold one score for each of {len(vocabulary.tokens)} tokens"
        )
    return models.BPE(
        vocab={token: number for number, token in enumerate(vocabulary.tokens)},
        merges=spm_merges(vocabulary.tokens, scores, vocabulary.types),
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )


def spm_merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Return the merges that a scored vocabulary implies, best first.

    SentencePiece merges the neighbours whose union has the best score: every way to cut a token in two tokens is a
    merge, ranked by the score of the token.
    """
    ids = {token: number for number, token in enumerate(tokens) if types[number] in (1, _USER_DEFINED)}
    ranked = []
    for token, number in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[number], ids[left], ids[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(ranked)]


def _add_tokens(backend: Backend, vocabulary: Vocabulary) -> None:
    from tokenizers import AddedToken

    control = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _CONTROL]
    user = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in user])


def _add_ends(backend: Backend, vocabulary: Vocabulary, *, add_bos: bool) -> None:
    from tokenizers import processors

    first = _end(vocabulary, "bos", add_bos)
    last = _end(vocabulary, "eos", False)
    if first or last:
        single = [*first, "$A", *last]
        pair = [*single, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)]
        special = [(token, vocabulary.tokens.index(token)) for token in dict.fromkeys([*first, *last])]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _end(vocabulary: Vocabulary, name: str, default: bool) -> list[str]:
    token = vocabulary.token(name)
    return [token] if token is not None and vocabulary.flag(f"add_{name}_token", default) else []


def _wrong(path: str, key: str, value: object, what: str) -> CheckpointError:
    return CheckpointError(
        f"tokenizer.ggml.{key} of {path} {what}",
        field=f"tokenizer.ggml.{key}",
        value=value,
        remedy="convert the model again",
    )
