from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import byte_level_keys, load, spm_keys, write_gguf

from jackfield.errors import CheckpointError
from jackfield.tokenizer import Tokenizer
from jackfield.tokenizer.pretokenizers import PRE_TOKENIZERS, build_pre_tokenizer


# Each expression with the published examples of the texts that tell it apart.
@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
        ("smollm", "a 12  3", ["a", " ", "1", "2", "  ", "3"]),
        ("llama-bpe", "IT'S 12345 (x)\n\n", ["IT", "'S", " ", "123", "45", " (", "x", ")\n\n"]),
        ("qwen2", "IT'S 123 _x", ["IT", "'S", " ", "1", "2", "3", " _", "x"]),
        ("default", "a+b 1234.", ["a", "+", "b", " ", "123", "4", "."]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
    ],
)
def test_how_text_is_cut(name: str, text: str, want: list[str]) -> None:
    cutter = build_pre_tokenizer(PRE_TOKENIZERS[name])
    assert [text[start:stop] for _, (start, stop) in cutter.pre_tokenize_str(text)] == want


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level_keys(pre="smolm"))
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert caught.value.message == f"the pre-tokenizer 'smolm' of {path} is unknown"
    assert (caught.value.field, caught.value.value) == ("tokenizer.ggml.pre", "smolm")
    assert caught.value.remedy.startswith("did you mean 'smollm'? known are: codeshell,")


def test_byte_level_round_trip_and_flags(tmp_path: Path) -> None:
    plain = load(write_gguf(tmp_path / "a.gguf", byte_level_keys()))
    text = "the quick fox isn't 日本 😀\n\n"
    ids = plain.encode(text)
    assert plain.decode(ids) == text
    assert len(ids) < len(text.encode())
    end, start, tool = (plain.vocab_size - back for back in (3, 2, 1))
    assert plain.encode("<|start|><tool call>a") == [start, tool, *plain.encode("a")]
    assert plain.decode([start, tool, end]) == "<tool call>"
    assert plain.decode([start, tool, end], skip_special_tokens=False) == "<|start|><tool call><|end|>"
    assert plain.special_ids == {end, start}
    assert plain.added_ids == {end, start, tool}
    ended = load(write_gguf(tmp_path / "b.gguf", byte_level_keys(add_bos_token=True, add_eos_token=True)))
    assert ended.encode(text) == [start, *ids, end]
    assert ended.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    ("keys", "adds"),
    [
        (byte_level_keys("gpt-2"), False),
        (byte_level_keys("llama-bpe"), True),
        (byte_level_keys("llama-bpe", add_bos_token=False), False),
        (spm_keys(), True),
        (spm_keys(add_bos_token=False), False),
    ],
    ids=["bpe", "llama 3", "llama 3 without", "spm", "spm without"],
)
def test_bos_where_the_file_does_not_say(tmp_path: Path, keys: dict[str, Any], adds: bool) -> None:
    tokenizer = load(write_gguf(tmp_path / "m.gguf", keys))
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) is adds


def test_all_ends_of_generation(tmp_path: Path) -> None:
    tokenizer = load(write_gguf(tmp_path / "m.gguf", byte_level_keys(eot_token_id=7, eom_token_id=9)))
    assert tokenizer.eos_token_ids == {tokenizer.vocab_size - 3, 7, 9}


def reference_spm(text: str, keys: dict[str, Any]) -> list[int]:
    """SentencePiece BPE by its definition: merge the neighbours whose union scores best, the leftmost of equals."""
    ids = {token: number for number, token in enumerate(keys["tokens"])}
    pieces = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        unions = [
            (-keys["scores"][ids[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids
        ]
        if not unions:
            break
        at = min(unions)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    out: list[int] = []
    for piece in pieces:
        out += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return out


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(write_gguf(tmp_path_factory.mktemp("spm") / "m.gguf", spm_keys()))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abctheinr é日本😀\n", max_size=30))
def test_spm_equals_its_definition(spm: Tokenizer, text: str) -> None:
    ids = spm.encode(text, add_special_tokens=False)
    assert ids == reference_spm(text, spm_keys())
    assert spm.decode(ids) == text


def test_spm_without_a_space_prefix(tmp_path: Path) -> None:
    tokenizer = load(write_gguf(tmp_path / "m.gguf", spm_keys(add_space_prefix=False)))
    tokens = spm_keys()["tokens"]
    assert [tokens[number] for number in tokenizer.encode("the a")] == ["<s>", "t", "he", "\u2581a"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "the GGUF file holds no tokenizer"),
        ({"model": "gpt2"}, "the GGUF file holds no tokenizer"),
        (byte_level_keys(model="bert"), "tokenizer.ggml.model of {path} is a kind of tokenizer that is unknown"),
        (byte_level_keys(merges=["q zz"]), "has a merge of tokens that are not in the vocabulary"),
        (byte_level_keys(token_type=[1]), "tokenizer.ggml.token_type of {path} has not one entry for each"),
        (byte_level_keys(tokens=["a", "a"], token_type=[1, 1]), "tokenizer.ggml.tokens of {path} holds tokens twice"),
        (byte_level_keys(eos_token_id=9999), "tokenizer.ggml.eos_token_id of {path} lies outside the vocabulary"),
        (spm_keys(scores=[0.5]), "tokenizer.ggml.scores of {path} must hold one score for each"),
    ],
    ids=["none", "no tokens", "kind", "merge", "types", "twice", "id", "scores"],
)
def test_wrong_tokenizers(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert message.format(path=path) in caught.value.message
    assert caught.value.remedy
