from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import byte_level_keys, load, spm_keys, write_gguf
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jackfield.tokenizer import IncrementalDetokenizer, Tokenizer
from jackfield.tokenizer.pieces import DecoderStyle

BYTE_LEVEL_SIZE, SPM_SIZE = (len(keys["tokens"]) for keys in (byte_level_keys(), spm_keys()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> Tokenizer:
    return load(write_gguf(folder / "bpe.gguf", byte_level_keys()))


@pytest.fixture(scope="module")
def spm(folder: Path) -> Tokenizer:
    return load(write_gguf(folder / "spm.gguf", spm_keys()))


@pytest.fixture(scope="module")
def spm_plain(folder: Path) -> Tokenizer:
    return load(write_gguf(folder / "plain.gguf", spm_keys(add_space_prefix=False)))


def stream(detokenizer: IncrementalDetokenizer, ids: list[int], cuts: list[int]) -> str:
    """Push ``ids`` in groups that end at ``cuts``."""
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [detokenizer.push(ids[start:stop]) for start, stop in itertools.pairwise(edges)]
    return "".join(parts) + detokenizer.flush()


CUTS = st.lists(st.integers(0, 30), max_size=6)
BYTE_LEVEL_IDS = st.lists(st.integers(0, BYTE_LEVEL_SIZE + 3), max_size=30)
# Mostly bytes of multi-byte characters, spaces and special tokens: where it is hard.
SPM_IDS = st.lists(
    st.one_of(
        st.integers(0, SPM_SIZE - 1),
        st.sampled_from([3 + byte for byte in (*"é日😀".encode(), 0x41, 0xE2, 0xFF)]),
        st.sampled_from([1, 2, 259, spm_keys()["tokens"].index("\u2581"), spm_keys()["tokens"].index("\u2581the")]),
    ),
    max_size=30,
)


@settings(max_examples=500, deadline=None)
@given(ids=BYTE_LEVEL_IDS, cuts=CUTS, prompt=BYTE_LEVEL_IDS, skip=st.booleans())
def test_byte_level_equals_decode(
    byte_level: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int], skip: bool
) -> None:
    assert byte_level.pieces.style is DecoderStyle.BYTE_LEVEL
    detokenizer = IncrementalDetokenizer(byte_level, prompt, skip_special_tokens=skip)
    assert stream(detokenizer, ids, cuts) == byte_level.decode(ids, skip_special_tokens=skip)


@settings(max_examples=500, deadline=None)
@given(ids=SPM_IDS, cuts=CUTS, skip=st.booleans())
def test_spm_equals_decode(spm: Tokenizer, spm_plain: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    assert (spm.pieces.style, spm_plain.pieces.style) == (DecoderStyle.SPM_STRIP, DecoderStyle.SPM)
    for tokenizer in (spm, spm_plain):
        detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip)
        assert stream(detokenizer, ids, cuts) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=500, deadline=None)
@given(ids=SPM_IDS, cuts=CUTS, prompt=SPM_IDS, skip=st.booleans())
def test_spm_equals_what_the_output_adds_to_the_prompt(
    spm: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int], skip: bool
) -> None:
    whole = [*prompt, spm.encode("a", add_special_tokens=False)[-1]]
    before = spm.decode(whole, skip_special_tokens=skip)
    after = spm.decode([*whole, *ids], skip_special_tokens=skip)
    assert after.startswith(before)
    detokenizer = IncrementalDetokenizer(spm, whole, skip_special_tokens=skip)
    assert stream(detokenizer, ids, cuts) == after[len(before) :]


def test_the_space_between_prompt_and_output_is_kept(spm: Tokenizer) -> None:
    the = spm.encode("the", add_special_tokens=False)
    assert IncrementalDetokenizer(spm, spm.encode("a")).push(the) == " the"
    assert IncrementalDetokenizer(spm, []).push(the) == "the"
    # A BOS token that is left out is no text before the output.
    assert IncrementalDetokenizer(spm, [1]).push(the) == "the"
    assert IncrementalDetokenizer(spm, [1], skip_special_tokens=False).push(the) == " the"


def test_incomplete_characters_wait_and_break_at_the_end(byte_level: Tokenizer) -> None:
    tokens = byte_level_keys()["tokens"]
    first, second = tokens.index("Ã"), tokens.index("©")
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([second]) == "é"
    assert detokenizer.push([first]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_bytes_of_sentencepiece_wait_for_the_end_of_their_run(spm: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(spm)
    ids = [3 + byte for byte in "日😀".encode()]
    assert detokenizer.push(ids) == ""
    assert detokenizer.push(spm.encode("a", add_special_tokens=False)) == "日😀 a"
    detokenizer.push([3 + 0xE2, 3 + 0x82])
    assert detokenizer.flush() == "\ufffd\ufffd"


def word_level(decoder: Any = None) -> Tokenizer:
    words = ["[UNK]", "hello", "##wo", "world", "é", "[A]", "[B]", "<0xFF>"]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.add_tokens([AddedToken(word, special=False) for word in ("[A]", "[B]")])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()], ids=["none", "pieces", "meta"])
@settings(max_examples=150, deadline=None)
@given(prompt=st.lists(st.integers(1, 6), max_size=8), ids=st.lists(st.integers(1, 6), max_size=30), cuts=CUTS)
def test_other_decoders_equal_decode(decoder: Any, prompt: list[int], ids: list[int], cuts: list[int]) -> None:
    tokenizer = word_level(decoder)
    assert tokenizer.pieces.style is DecoderStyle.OTHER
    text = stream(IncrementalDetokenizer(tokenizer, prompt), ids, cuts)
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])


def test_spaces_between_added_tokens() -> None:
    tokenizer, ids = word_level(), [5, 6, 1, 5]
    assert IncrementalDetokenizer(tokenizer).push(ids) == "[A] [B] hello [A]"
    assert IncrementalDetokenizer(tokenizer, spaces_between_special_tokens=False).push(ids) == "[A][B] hello [A]"


def test_the_cost_of_a_token_does_not_grow(
    byte_level: Tokenizer, spm: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [0]
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    broken = word_level(decoders.ByteFallback())
    prompt = [1] * 1000
    for tokenizer, most in ((byte_level, 0), (spm, 0), (word_level(), 7), (broken, 32)):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        for number in range(2000):
            detokenizer.push([7 if tokenizer is broken else 1 + number % 6])
        assert max(lengths) <= most
        lengths[:] = [0]
