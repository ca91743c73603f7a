"""Small tokenizers of both families, and GGUF files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from jackfield.checkpoint import read_facts
from jackfield.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXT = ["the quick brown fox isn't here", " naïve café 123 déjà vu", "日本語 テキスト 😀😀 emoji", "  a  b\n\nc\t"] * 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level_keys(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """A BPE vocabulary trained on a few words, with two control tokens and one user-defined token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, "<|end|>", "<|start|>", "<tool call>"],
        "token_type": [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER_DEFINED],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "eos_token_id": len(tokens),
        "bos_token_id": len(tokens) + 1,
        **more,
    }


def spm_keys(**more: Any) -> dict[str, Any]:
    """A SentencePiece BPE vocabulary: unknown, BOS, EOS, all bytes, then pieces by falling score."""
    pieces = ["\u2581t", "he", "\u2581the", "in", "\u2581a", "er", "ab", "abc", "bc", "\u2581\u2581", "é", "日本"]
    pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyz日本", "\u2581\u2581\u2581\u2581"]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "[USER]"]
    return {
        "model": "llama",
        "tokens": [*special, *pieces],
        "scores": [0.0] * len(special) + [-float(rank) for rank in range(len(pieces))],
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * len(pieces)],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def write_gguf(path: Path, keys: dict[str, Any], template: str | None = TEMPLATE) -> Path:
    """Write a GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"tokenizer.ggml.{name}", value)
    if template is not None:
        writer.add_string("tokenizer.chat_template", template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(path: Path) -> Tokenizer:
    return load_tokenizer(path, read_facts(path))
