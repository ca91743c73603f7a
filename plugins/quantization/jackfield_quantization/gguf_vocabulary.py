"""Writes a tokenizer into a GGUF file: byte-level BPE (``gpt2``) and BPE of SentencePiece (``llama``).

Source: the ``tokenizer.ggml`` keys of the GGUF specification, and the form of tokenizer.json of the tokenizers library.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import gguf
from gguf import TokenType

from jackfield.errors import ConfigError
from jackfield_quantization.gguf_cuts import name_of_cuts

SPACE = "\u2581"
"""What SentencePiece has in place of a space."""
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
LOG = logging.getLogger("jackfield.quantize")
SPECIAL = ("bos", "unk", "pad")
"""Whose ids are written besides those of ends."""


def add_vocabulary(writer: gguf.GGUFWriter, folder: Path, rows: int) -> int | None:
    """Write the tokenizer of a folder.

    Args:
        writer: of the file. folder: with tokenizer.json and what lies beside it. rows: of the embedding.

    Returns:
        The id of the token that ends a text, where there is one.

    Raises:
        ConfigError: the format has nothing that gives the same tokens.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        _refuse("the tokenizer has no tokenizer.json", "tokenizer", sorted(path.name for path in folder.iterdir()))
    described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    model = described["model"]
    if model.get("type") != "BPE":
        _refuse("GGUF has no tokenizers of this kind", "model.type", model.get("type"))
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            _refuse("GGUF has no key for this", f"model.{key}", model[key])
    special = gguf.SpecialVocab(folder, load_merges=True, special_token_types=(*SPECIAL, "eos"), n_vocab=rows)
    tokens, types = _tokens(described, rows)
    if model.get("byte_fallback"):
        _add_pieces(writer, described, special, tokens, types)
    else:
        if (described.get("decoder") or {}).get("type") != "ByteLevel":
            _refuse("GGUF has no tokenizers that are put together like this", "decoder", described.get("decoder"))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name_of_cuts(described))
        writer.add_token_merges(special.merges)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    ids: dict[str, int] = special.special_token_ids
    for name in SPECIAL:
        if name in ids:
            getattr(writer, f"add_{name}_token_id")(ids[name])
    _add_flags(writer, file, ids)
    if special.chat_template is not None:
        writer.add_chat_template(special.chat_template)
    return ids.get("eos")


def _tokens(described: Mapping[str, Any], rows: int) -> tuple[list[str], list[TokenType]]:
    """Return all tokens, one for each row of the embedding, and their types."""
    by_id = {number: token for token, number in described["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, TokenType.NORMAL)
    for added in described.get("added_tokens") or ():
        if any(added.get(key) for key in ("lstrip", "rstrip", "single_word")):
            _refuse("GGUF cannot say that a token takes what stands beside it", "added_tokens", added["content"])
        by_id[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
    if by_id and max(by_id) >= rows:
        _refuse(f"the tokenizer has more tokens than the {rows} rows of the embedding", "vocab_size", max(by_id) + 1)
    for number in range(rows):
        if number not in by_id:
            by_id[number], types[number] = f"[PAD{number}]", TokenType.UNUSED
    tokens = [by_id[number] for number in range(rows)]
    if len(set(tokens)) < rows:
        _refuse("the tokenizer has tokens twice", "vocab_size", rows - len(set(tokens)))
    return tokens, [types[number] for number in range(rows)]


def _add_flags(writer: gguf.GGUFWriter, file: Path, ids: Mapping[str, int]) -> None:
    """Write which tokens are put around a text, as the tokenizer does it."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(file))
    bare, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    before = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), None)
    ends = None if before is None else (whole[:before], whole[before + len(bare) :])
    for place, name in enumerate(("bos", "eos")):
        found = None if ends is None else ends[place]
        if found not in ([], [ids.get(name)]):
            _refuse(
                "the tokenizer puts other tokens around a text than one that begins and one that ends it",
                "post_processor",
                whole,
            )
        getattr(writer, f"add_add_{name}_token")(bool(found))


def _add_pieces(
    writer: gguf.GGUFWriter,
    described: Mapping[str, Any],
    special: gguf.SpecialVocab,
    tokens: Sequence[str],
    types: list[TokenType],
) -> None:
    """Write what BPE of SentencePiece has: scores, and the types of bytes and of the unknown token."""
    model = described["model"]
    missing = BYTES - set(tokens)
    if missing:
        _refuse("the tokenizer lacks tokens of bytes", "model.vocab", sorted(missing)[0])
    for number, token in enumerate(tokens):
        if token in BYTES:
            types[number] = TokenType.BYTE
    if (unknown := special.special_token_ids.get("unk")) is not None:
        types[unknown] = TokenType.UNKNOWN
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    scores = _scores(tokens, merges)
    if implied_merges(tokens, scores, types) != merges:
        _refuse("the tokenizer merges other pieces than their scores would say", "model.merges", len(merges))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(_has_prefix(described))


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Return scores that fall with the place of the first merge that makes a token; what none makes is last."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def implied_merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[TokenType]) -> list[tuple[str, ...]]:
    """Return the merges that a reader takes from scores: of each token every cut into two tokens, by falling score."""
    ids = {
        token: number
        for number, token in enumerate(tokens)
        if types[number] in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    cuts = [
        (-scores[number], ids[token[:at]], ids[token[at:]])
        for token, number in ids.items()
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(cuts)]


def _has_prefix(described: Mapping[str, Any]) -> bool:
    """Return whether a space is put before a text, which has SentencePiece's sign for spaces in place of them."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    normal, cut = described.get("normalizer"), described.get("pre_tokenizer")
    steps = normal["normalizers"] if normal and normal["type"] == "Sequence" else [normal] if normal else []
    if cut is None and steps in ([replace], [prepend, replace]):
        return len(steps) == 2
    if not steps and cut and cut["type"] == "Metaspace" and cut["replacement"] == SPACE and not cut.get("split", True):
        if cut.get("prepend_scheme") == "never":
            return False
        LOG.warning(
            "readers of GGUF put a space before every piece of text, as SentencePiece does; this tokenizer puts none "
            "before a space, and perhaps none behind a special token"
        )
        return True
    _refuse("GGUF has nothing that prepares texts like this tokenizer", "normalizer", [normal, cut])


def _refuse(what: str, key: str, value: object) -> NoReturn:
    raise ConfigError(
        what,
        field=f"tokenizer.json: {key}",
        value=value,
        remedy="write another format; or write the model without a tokenizer, from a folder that has none",
    )
