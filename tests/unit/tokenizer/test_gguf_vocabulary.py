"""Tokenizers that are written into GGUF files give the ids that they gave before, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from tokenizer_samples import TEXT, byte_level_keys, load, spm_keys, write_gguf
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jackfield.checkpoint import read_facts
from jackfield.errors import ConfigError
from jackfield.tokenizer import Tokenizer, load_tokenizer
from jackfield.tokenizer.pretokenizers import PRE_TOKENIZERS
from jackfield_quantization.gguf_cuts import NAMES, name_of_cuts
from jackfield_quantization.gguf_vocabulary import add_vocabulary

ROWS = 400


def again(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """Write a tokenizer into a GGUF file, and read it from there."""
    folder.mkdir()
    tokenizer.save(folder)
    file = folder / "again.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    end = add_vocabulary(writer, folder, ROWS)
    if end is not None:
        writer.add_eos_token_id(end)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load(file)


def check_same(one: Tokenizer, other: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        for special in (False, True):
            ids = one.encode(text, add_special_tokens=special)
            assert other.encode(text, add_special_tokens=special) == ids, text
            assert other.decode(ids, skip_special_tokens=special) == one.decode(ids, skip_special_tokens=special)
    assert other.special_ids == one.special_ids
    assert (other.bos_token_id, other.eos_token_ids) == (one.bos_token_id, one.eos_token_ids)


@pytest.mark.parametrize("pre", NAMES.values())
@pytest.mark.parametrize("ends", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_byte_level_tokenizers_survive(tmp_path: Path, pre: str, ends: dict[str, Any]) -> None:
    one = load(write_gguf(tmp_path / "one.gguf", byte_level_keys(pre, **ends)))
    texts = [*TEXT[:4], "", "It's <tool call>ISN'T 1234567 x<|end|>y", "e\u0301", "HelloWorld\r\n\n  a"]
    other = again(one, tmp_path / "again")
    check_same(one, other, texts)
    assert read_facts(tmp_path / "again" / "again.gguf").config["tokenizer.ggml.pre"] == pre
    assert other.chat_template == one.chat_template


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_survives(tmp_path: Path, prefix: bool) -> None:
    one = load(write_gguf(tmp_path / "one.gguf", spm_keys(add_space_prefix=prefix, add_eos_token=True)))
    texts = ["the cab", " the  in", "", "abc é 日本 😀", "x[USER]y<s>the", "    a"]
    check_same(one, again(one, tmp_path / "again"), texts)


def test_trained_sentencepiece(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What transformers makes of it puts no space before a text that begins with one; files of the format cannot say
    that.
    """
    import sentencepiece

    values = {"model_type": "bpe", "vocab_size": 330, "byte_fallback": True, "hard_vocab_limit": False}
    values |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 3), model_prefix=str(tmp_path / "tokenizer"), **values
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **named}))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    one = load_tokenizer(tmp_path, read_facts(tmp_path))
    other = again(one, tmp_path / "again")
    assert "put a space before every piece" in caplog.text
    check_same(one, other, [text.strip() for text in TEXT[:4]])
    library = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    for text in (*TEXT[:4], " a", "  b"):
        assert other.encode(text, add_special_tokens=False) == library.encode(text), text


def test_names_are_those_that_the_engine_reads() -> None:
    for cuts, name in NAMES.items():
        spec = PRE_TOKENIZERS[name]
        assert (cuts.patterns, cuts.whole, cuts.composed) == (spec.patterns, spec.ignore_merges, spec.nfc), name


def described(change: Callable[[Backend], None] = lambda backend: None) -> dict[str, Any]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    change(backend)
    found: dict[str, Any] = json.loads(backend.to_str())
    return found


@pytest.mark.parametrize(("kind", "name"), [("GPT2Tokenizer", "gpt-2"), ("Qwen2Tokenizer", "qwen2")])
def test_tokenizers_of_transformers_are_known(kind: str, name: str) -> None:
    made = getattr(transformers, kind)(vocab={"a": 0, "<|endoftext|>": 1}, merges=[])
    assert name_of_cuts(json.loads(made.backend_tokenizer.to_str())) == name


def test_digits_before_words_are_known() -> None:
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert name_of_cuts(described(lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Sequence([digits, words])))) == (
        "smollm"
    )


CUTS = {
    "nothing": None,
    "spaces": pre_tokenizers.Whitespace(),
    "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "several digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "removed": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "removed"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "another expression": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@pytest.mark.parametrize("cut", CUTS)
def test_other_cuts_are_refused(cut: str) -> None:
    changed = described()
    backend = Backend.from_str(json.dumps(changed))
    if CUTS[cut] is None:
        changed["pre_tokenizer"] = None
    else:
        backend.pre_tokenizer = CUTS[cut]
        changed = json.loads(backend.to_str())
    with pytest.raises(ConfigError) as caught:
        name_of_cuts(changed)
    assert caught.value.field == "tokenizer.json: pre_tokenizer" and caught.value.remedy


def test_other_normalizers_are_refused() -> None:
    with pytest.raises(ConfigError):
        name_of_cuts(described(lambda backend: setattr(backend, "normalizer", normalizers.NFKC())))


def refused(tmp_path: Path, keys: dict[str, Any], change: Callable[[dict[str, Any]], None], rows: int = ROWS) -> str:
    """Return the field that is named when a changed tokenizer.json is refused."""
    load(write_gguf(tmp_path / "one.gguf", keys)).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        add_vocabulary(gguf.GGUFWriter(None, "llama"), tmp_path, rows)
    assert caught.value.remedy
    return str(caught.value.field).removeprefix("tokenizer.json: ")


CHANGES: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any]], Any], str]] = {
    "kind": (byte_level_keys, lambda v: v["model"].update(type="WordPiece"), "model.type"),
    "suffix": (byte_level_keys, lambda v: v["model"].update(end_of_word_suffix="</w>"), "model.end_of_word_suffix"),
    "decoder": (byte_level_keys, lambda v: v.update(decoder=None), "decoder"),
    "strips": (byte_level_keys, lambda v: v["added_tokens"][0].update(lstrip=True), "added_tokens"),
    "bytes": (spm_keys, lambda v: v["model"]["vocab"].update({"<0x0A>x": v["model"]["vocab"].pop("<0x0A>")}), "model"),
    "lost merge": (spm_keys, lambda v: v["model"]["merges"].pop(0), "model.merges"),
    "normalizer": (spm_keys, lambda v: v.update(normalizer={"type": "NFKC"}), "normalizer"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_gives_other_tokens_is_refused(tmp_path: Path, case: str) -> None:
    keys, change, field = CHANGES[case]
    assert refused(tmp_path, keys(), change).startswith(field)


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, byte_level_keys(), lambda values: None, rows=100) == "vocab_size"


def test_other_tokens_around_a_text_are_refused(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<cls>"), AddedToken("<end>")])
    backend.post_processor = processors.TemplateProcessing(single="<cls> $A", special_tokens=[("<cls>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        add_vocabulary(gguf.GGUFWriter(None, "llama"), tmp_path, ROWS)
    assert caught.value.field == "tokenizer.json: post_processor" and caught.value.value == [2, 0]


def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        add_vocabulary(gguf.GGUFWriter(None, "llama"), tmp_path, ROWS)
    assert caught.value.value == ["tekken.json"]
