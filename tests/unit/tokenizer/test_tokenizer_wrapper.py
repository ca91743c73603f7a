from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizer_samples import TEMPLATE, byte_level_keys, load, write_gguf

from jackfield.checkpoint import read_facts
from jackfield.errors import CheckpointError, RequestError
from jackfield.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(write_gguf(tmp_path_factory.mktemp("bpe") / "m.gguf", byte_level_keys(add_bos_token=True)))


def test_chat_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template == TEMPLATE
    text = "<|start|>[user]a<|end|>[assistant]"
    assert tokenizer.apply_chat_template(MESSAGES) == text
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == "<|start|>[user]a<|end|>"
    ids = tokenizer.apply_chat_template(MESSAGES, tokenize=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.vocab_size - 2) == 1


def test_tools_and_other_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert '"name": "f"' in tokenizer.apply_chat_template(MESSAGES, tools=tools)
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="{{ mood }}!", mood="calm") == "calm!"


def test_conversations_that_the_template_refuses(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    assert caught.value.message == "the chat template does not accept this conversation: no tools"
    assert caught.value.field == "messages"


def test_templates_run_in_a_sandbox(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="does not accept this conversation"):
        tokenizer.apply_chat_template(MESSAGES, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")


def test_a_model_without_a_template(tmp_path: Path) -> None:
    plain = load(write_gguf(tmp_path / "m.gguf", byte_level_keys(), template=None))
    assert plain.chat_template is None
    with pytest.raises(RequestError, match="the model has no chat template"):
        plain.apply_chat_template(MESSAGES)
    assert plain.apply_chat_template(MESSAGES, chat_template="x") == "x"


def test_a_folder_gives_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    loaded = load_tokenizer(tmp_path, read_facts(tmp_path))
    text = "the <|end|> fox 日本"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == "the  fox 日本"
    assert loaded.eos_token_ids == {5, 6, loaded.vocab_size - 3}
    assert (loaded.chat_template, loaded.special_ids) == (TEMPLATE, tokenizer.special_ids)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path, read_facts(tmp_path))
    assert caught.value.message == "the folder holds no tokenizer"
    assert caught.value.remedy.startswith("put one of tokenizer.json,")


def test_a_damaged_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path, read_facts(tmp_path))
