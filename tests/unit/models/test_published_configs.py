"""What architectures read from published configurations is what transformers reads from them."""

from __future__ import annotations

from typing import Any

import pytest
from published import CONFIGS
from transformers import AutoConfig

from jackfield.checkpoint import JsonConfigReader
from jackfield.errors import CheckpointError, ConfigError
from jackfield.interfaces.weights import unique_targets
from jackfield_models import bloom, cohere, gemma, gpt, llama, olmo, relatives, variants
from jackfield_models.decoder import Decoder, DecoderConfig
from jackfield_models.rope import Rope

MODULES = (bloom, cohere, gemma, gpt, llama, olmo, relatives, variants)
ARCHITECTURES: dict[str, type[Decoder]] = {
    made.name: made
    for module in MODULES
    for made in vars(module).values()
    if isinstance(made, type) and issubclass(made, Decoder) and made.kinds
}


def read(values: dict[str, Any]) -> DecoderConfig:
    """Return a configuration; every key was read."""
    reader = JsonConfigReader(values)
    config = ARCHITECTURES[values["architectures"][0]].config(reader)
    reader.finish()
    return config


def reference(values: dict[str, Any]) -> Any:
    rest = {key: value for key, value in values.items() if key not in ("model_type", "architectures")}
    return AutoConfig.for_model(values["model_type"], **rest)


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_and_positions_are_those_of_transformers(name: str) -> None:
    config, expected = read(CONFIGS[name]), reference(CONFIGS[name])
    head = getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
    assert config.head_size == head
    assert config.tie_embeddings == expected.tie_word_embeddings
    assert config.num_layers == expected.num_hidden_layers
    assert config.vocab_size == expected.vocab_size
    for layer, rope in enumerate(config.ropes):
        check_rope(rope, expected, layer)


def check_rope(rope: Rope | None, expected: Any, layer: int) -> None:
    """Compare one layer's rotary embedding with the object that transformers has for it."""
    parameters = getattr(expected, "rope_parameters", None)
    types = getattr(expected, "layer_types", None)
    if rope is None or parameters is None:
        return
    if types and types[layer] in parameters:
        parameters = parameters[types[layer]]
    assert rope.theta == parameters["rope_theta"]
    kind = parameters["rope_type"]
    assert (rope.scaling or {"rope_type": "default"})["rope_type"] == kind
    for key in ("factor", "original_max_position_embeddings", "attention_factor", "alpha"):
        if kind != "default" and key in parameters:
            assert rope.scaling is not None and rope.scaling[key] == parameters[key]


@pytest.mark.parametrize("name", CONFIGS)
def test_weight_maps_write_each_module_once(name: str) -> None:
    values = CONFIGS[name]
    architecture = ARCHITECTURES[values["architectures"][0]]
    rules = architecture.weight_map(read(values), "safetensors").rules
    assert unique_targets(rules) == []
    assert len(rules) > read(values).num_layers


@pytest.mark.parametrize("name", CONFIGS)
def test_groups_hold_every_layer_once(name: str) -> None:
    values = CONFIGS[name]
    config = read(values)
    groups = ARCHITECTURES[values["architectures"][0]].attention_groups(config)
    layers = sorted(layer for group in groups for layer in group.layers)
    assert layers == list(range(config.num_layers))
    assert len({group.name for group in groups}) == len(groups)


def test_windows_and_rotations_follow_the_published_patterns() -> None:
    config = read(CONFIGS["gemma-3-1b"])
    assert [i for i, window in enumerate(config.windows) if window is None] == [5, 11, 17, 23]
    assert config.ropes[0] == Rope(size=256, theta=10000.0)
    assert config.ropes[5] is not None and config.ropes[5].theta == 1000000.0
    config = read(CONFIGS["command-r7b"])
    assert [i for i, rope in enumerate(config.ropes) if rope is None] == list(range(3, 32, 4))
    config = read(CONFIGS["gemma-2-2b"])
    assert config.windows == (4096, None) * 13
    config = read(CONFIGS["olmo-3-7b"])
    assert config.ropes[0] == Rope(size=128, theta=500000.0)
    assert config.ropes[3] is not None and config.ropes[3].scaling is not None


def test_parts_of_heads_rotate() -> None:
    sizes = {name: read(CONFIGS[name]).ropes[0] for name in ("phi-2", "phi-4-mini", "pythia-160m", "glm-4-9b-0414")}
    assert {name: rope.size for name, rope in sizes.items() if rope} == {
        "phi-2": 32,
        "phi-4-mini": 96,
        "pythia-160m": 16,
        "glm-4-9b-0414": 64,
    }


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("command-r7b", "use_parallel_block", False),
        ("bloom-560m", "apply_residual_connection_post_layernorm", True),
        ("gpt-j-6b", "rotary", False),
        ("falcon-40b", "parallel_attn", False),
        ("hunyuan-7b", "use_cla", True),
    ],
)
def test_what_an_architecture_does_not_do_is_an_error(name: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read({**CONFIGS[name], key: value})
    assert caught.value.message == (f"the configuration asks for what this architecture does not do: {key} = {value!r}")


def test_unknown_layer_types_are_named() -> None:
    with pytest.raises(CheckpointError) as caught:
        read({**CONFIGS["gemma-3-1b"], "layer_types": ["chunked_attention"] * 26})
    assert caught.value.message == "layers of these types are not known: chunked_attention"


def test_keys_of_a_rotary_scaling_that_nothing_reads_are_an_error() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0, "beta_fast": 32, "low_freq_factor": 1.0}
    with pytest.raises(CheckpointError) as caught:
        read({**CONFIGS["granite-3.1-2b"], "rope_scaling": scaling})
    assert caught.value.message == (
        "nothing reads these keys of the rotary scaling 'linear': beta_fast, low_freq_factor"
    )


def test_an_unknown_rotary_scaling_is_refused_before_weights_are_read() -> None:
    with pytest.raises(ConfigError) as caught:
        read({**CONFIGS["granite-3.1-2b"], "rope_scaling": {"type": "llama4", "factor": 2.0}})
    assert caught.value.message == "rotary scaling 'llama4' is not known"
    assert caught.value.remedy == "did you mean 'llama3'?"


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="nothing reads these keys of the configuration: use_mystery = True"):
        read({**CONFIGS["gemma-2-2b"], "use_mystery": True})
