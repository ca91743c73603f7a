from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import write_folder

from jackfield.checkpoint import generation_defaults
from jackfield.errors import CheckpointError
from jackfield.interfaces import ModelFacts


def folder_facts(folder: Path, config: dict[str, Any]) -> ModelFacts:
    return ModelFacts(str(folder), "safetensors", "A", config=config)


def test_generation_config_outranks_config(tmp_path: Path) -> None:
    facts = folder_facts(tmp_path, {"eos_token_id": 1, "bos_token_id": 5})
    assert generation_defaults(facts).eos_token_ids == (1,)
    own = {"eos_token_id": [3, 2, 3], "temperature": 1, "top_k": 20, "top_p": 0.9, "num_beams": 4, "min_p": None}
    write_folder(tmp_path, {"generation_config.json": own})
    defaults = generation_defaults(facts)
    assert (defaults.eos_token_ids, defaults.bos_token_id) == ((3, 2), 5)
    assert defaults.sampling == {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
    assert generation_defaults(facts, tmp_path / "elsewhere").eos_token_ids == (1,)


def test_ids_of_a_nested_config(tmp_path: Path) -> None:
    assert generation_defaults(folder_facts(tmp_path, {"text_config": {"eos_token_id": [7]}})).eos_token_ids == (7,)


def test_gguf_metadata() -> None:
    config = {
        "tokenizer.ggml.bos_token_id": 9,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.ggml.eom_token_id": 2,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 40,
    }
    defaults = generation_defaults(ModelFacts("m.gguf", "gguf", "gguf:llama", config=config))
    assert (defaults.eos_token_ids, defaults.bos_token_id) == ((2, 4), 9)
    assert defaults.sampling == {"temperature": 0.5, "top_k": 40}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"eos_token_id": "2"}, "eos_token_id must be a token id or a list of them, but is '2'"),
        ({"eos_token_id": [True]}, "eos_token_id must be a token id or a list of them, but is [True]"),
        ({"eos_token_id": -1}, "eos_token_id must be a token id or a list of them, but is -1"),
        ({"top_p": "high"}, "top_p must be a number, but is 'high'"),
        ({"top_k": 1.5}, "top_k must be a number, but is 1.5"),
        ({"temperature": float("inf")}, "temperature must be a number, but is inf"),
    ],
)
def test_wrong_values(tmp_path: Path, own: dict[str, Any], message: str) -> None:
    write_folder(tmp_path, {"generation_config.json": own})
    with pytest.raises(CheckpointError) as caught:
        generation_defaults(folder_facts(tmp_path, {}))
    assert caught.value.message == message
