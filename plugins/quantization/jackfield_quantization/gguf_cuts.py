"""Which of the format's names for ways to cut text (``tokenizer.ggml.pre``) a tokenizer.json means. No torch.

The expressions are those of the models' own tokenizers; they are part of the models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jackfield.errors import ConfigError

_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_START = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
DIGIT = r"\p{N}"
WORDS = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
"""What the tokenizers library cuts by where ``ByteLevel`` says no more than that it uses an expression."""


def _cased(end: str) -> str:
    """Return what begins expressions that cut before capitals."""
    return rf"{_START}{_UPPER}*{_LOWER}+{end}|{_START}{_UPPER}+{_LOWER}*{end}"


def _words(digits: str) -> str:
    return rf"(?i:{_ENDINGS})|{_START}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"


def _capitals(end: str, digits: str) -> str:
    return rf"{_cased(end)}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"


@dataclass(frozen=True, slots=True)
class Cuts:
    """One way to cut text.

    Args:
        patterns: expressions, applied in order. whole: pieces that are tokens are taken without merging. composed: text
            is brought to Unicode's composed form first.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    composed: bool = False


NAMES: Mapping[Cuts, str] = {
    Cuts((WORDS,)): "gpt-2",
    Cuts((DIGIT, WORDS)): "smollm",
    Cuts((_words(r"\p{N}{1,3}"),), whole=True): "llama-bpe",
    Cuts((_words(r"\p{N}{1,3}"),)): "dbrx",
    Cuts((_words(DIGIT),), composed=True): "qwen2",
    Cuts((_words(DIGIT),)): "stablelm2",
    Cuts((_capitals(f"(?i:{_ENDINGS})?", r"\p{N}{1,3}"),)): "gpt-4o",
    Cuts((_capitals("", DIGIT),), whole=True): "tekken",
}
"""What the format calls each; a test compares it with what the engine reads."""


def name_of_cuts(described: Mapping[str, Any]) -> str:
    """Return what the format calls the way in which a tokenizer cuts text.

    Args:
        described: tokenizer.json of a byte-level BPE.

    Raises:
        ConfigError: it has no name for it; another would give other tokens.
    """
    normal = described.get("normalizer")
    patterns = tuple(_patterns(described.get("pre_tokenizer")))
    cuts = Cuts(patterns, bool(described["model"].get("ignore_merges")), normal == {"type": "NFC"})
    if cuts not in NAMES or normal not in (None, {"type": "NFC"}):
        raise ConfigError(
            "GGUF has no name for the way in which the tokenizer cuts text",
            field="tokenizer.json: pre_tokenizer",
            value=described.get("pre_tokenizer"),
            remedy="write another format; or write the model without a tokenizer, from a folder that has none",
        )
    return NAMES[cuts]


def _patterns(cut: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the expressions by which a pre-tokenizer cuts; for what has none its kind, which no name has."""
    kind = cut.get("type") if cut else None
    if cut is None or kind is None:
        yield "nothing"
    elif kind == "Sequence":
        for part in cut["pretokenizers"]:
            yield from _patterns(part)
    elif kind == "Split" and cut["behavior"] == "Isolated" and not cut.get("invert") and "Regex" in cut["pattern"]:
        yield cut["pattern"]["Regex"]
    elif kind == "Digits" and cut.get("individual_digits"):
        yield DIGIT
    elif kind == "ByteLevel" and not cut.get("add_prefix_space"):
        if cut.get("use_regex", True):
            yield WORDS
    else:
        yield str(kind)
