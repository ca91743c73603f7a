from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import write_folder

from jackfield.checkpoint import generation_defaults
from jackfield.errors import CheckpointError, ConfigError
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


def test_where_defaults_come_from(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {"generation_config.json": {"eos_token_id": 3, "top_k": 20}})
    facts = folder_facts(folder, {"eos_token_id": 1})
    left_out = generation_defaults(facts, "none")
    assert (left_out.eos_token_ids, left_out.sampling) == ((1,), {})
    other = write_folder(tmp_path / "other", {"generation_config.json": {"top_p": 0.5}, "mine.json": {"top_k": 7}})
    found = generation_defaults(facts, str(other))
    assert (found.eos_token_ids, found.sampling) == ((1,), {"top_p": 0.5})
    assert generation_defaults(facts, str(other / "mine.json")).sampling == {"top_k": 7}
    with pytest.raises(ConfigError) as caught:
        generation_defaults(facts, str(tmp_path / "absent"))
    assert (caught.value.field, caught.value.value) == ("model.generation_config", str(tmp_path / "absent"))
    assert caught.value.message == "there is no such generation configuration"


def test_where_defaults_of_gguf_come_from(tmp_path: Path) -> None:
    config = {"tokenizer.ggml.eos_token_id": 2, "general.sampling.top_k": 40}
    facts = ModelFacts("m.gguf", "gguf", "gguf:llama", config=config)
    left_out = generation_defaults(facts, "none")
    assert (left_out.eos_token_ids, left_out.sampling) == ((2,), {})
    other = write_folder(tmp_path, {"generation_config.json": {"top_p": 0.5}})
    found = generation_defaults(facts, str(other))
    assert (found.eos_token_ids, found.sampling) == ((2,), {"top_p": 0.5})
    overridden = ModelFacts("m.gguf", "gguf", "gguf:llama", config={**config, "eos_token_id": 5})
    assert generation_defaults(overridden).eos_token_ids == (5,)
    assert generation_defaults(overridden).sampling == {"top_k": 40}


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
