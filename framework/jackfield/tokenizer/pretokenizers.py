"""How byte-level BPE models of GGUF files cut text before merging, by the name in ``tokenizer.ggml.pre``.

The expressions are those of the models' own tokenizers; they are part of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jackfield.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _gpt4(digits: str) -> str:
    return (
        rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{_ENDINGS})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{_ENDINGS})?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizerSpec:
    """One way to cut text.

    Args:
        patterns: regular expressions applied in order; matches are cut out, and what lies between stays whole.
        add_bos: whether texts begin with the BOS token where the file does not say.
        ignore_merges: a piece that is a token as a whole is taken without merging.
        nfc: whether text is brought to Unicode's composed form first.
    """

    patterns: tuple[str, ...]
    add_bos: bool = False
    ignore_merges: bool = False
    nfc: bool = False


_DIGITS = PreTokenizerSpec((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizerSpec((_gpt4("{1,3}"),), add_bos=True, ignore_merges=True)
_QWEN2 = PreTokenizerSpec((_gpt4(""),), nfc=True)
_PLAIN = PreTokenizerSpec((_GPT2,))

PRE_TOKENIZERS: Mapping[str, PreTokenizerSpec] = {
    "default": PreTokenizerSpec((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizerSpec((_gpt4("{1,3}"),))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "stablelm2": PreTokenizerSpec((_gpt4(""),)),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizerSpec((_GPT4O,))),
    "tekken": PreTokenizerSpec((_TEKKEN,), add_bos=True, ignore_merges=True),
}
"""By the name in the GGUF file."""


def find_pre_tokenizer(name: str, path: str) -> PreTokenizerSpec:
    """Return the way to cut text called ``name``.

    Raises:
        CheckpointError: it is unknown; guessing would give other tokens than the model was trained on.
    """
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        hint = did_you_mean(name, PRE_TOKENIZERS)
        raise CheckpointError(
            f"the pre-tokenizer '{name}' of {path} is unknown",
            field="tokenizer.ggml.pre",
            value=name,
            remedy=f"{hint} known are: {known}; or use the model's folder with tokenizer.json".strip(),
        )
    return PRE_TOKENIZERS[name]


def build_pre_tokenizer(spec: PreTokenizerSpec) -> PreTokenizer:
    """Return the pre-tokenizer object, mapping to byte characters included."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in spec.patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
