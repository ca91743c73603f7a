"""What the fallback refuses, with reasons; what it finds out about models; and that plugins come first."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from jackfield.checkpoint import JsonConfigReader
from jackfield.config import load_config
from jackfield.errors import CheckpointError, ConfigError, NoCandidateError
from jackfield.interfaces import AttentionGroup, Band, ModelFacts, ModelRequest, Plugin, Reason
from jackfield.interfaces.weights import unique_targets
from jackfield.oracle.pipeline import choose_architecture
from jackfield.oracle.verdict import Decision
from jackfield.registry import Registry
from jackfield_models.llama import Llama
from jackfield_models.transformers_fallback import Transformers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}


def keys(architecture: str, **values: Any) -> dict[str, Any]:
    """Return a config.json as transformers writes it."""
    config = getattr(transformers, architecture).config_class(**values).to_dict()
    return {**config, "architectures": [architecture]}


def reasons(config: dict[str, Any], **request: Any) -> list[Reason]:
    return list(Transformers.check(ModelRequest(kind=config["architectures"][0], config=config, **request)))


def groups(config: dict[str, Any]) -> tuple[AttentionGroup, ...]:
    return Transformers.attention_groups(Transformers.config(JsonConfigReader(config)))


@pytest.mark.parametrize(
    ("architecture", "values", "code", "detail"),
    [
        ("BartForCausalLM", {}, "encoder_decoder", "it has an encoder and a decoder"),
        ("GptOssForCausalLM", {}, "sinks", "model.layers.0.self_attn has attention sinks"),
        (
            "MambaForCausalLM",
            {"num_hidden_layers": 2},
            "attention_interface",
            "MambaModel does not take attention from outside (_supports_attention_backend)",
        ),
        (
            "RecurrentGemmaForCausalLM",
            {**SIZES, "lru_width": 32},
            "layers",
            "it mixes tokens by convolutions: layers.0.temporal_block.conv_1d, layers.1.temporal_block.conv_1d",
        ),
        (
            "Gemma3nForCausalLM",
            {},
            "embedding",
            "it looks up more than input tokens: embed_tokens_per_layer",
        ),
        (
            "Phi3ForCausalLM",
            {**SIZES, "pad_token_id": 0, "rope_parameters": LONG},
            "rope",
            "rotary embeddings of type longrope change with the longest sequence of a step",
        ),
        (
            "LlamaForCausalLM",
            {**SIZES, "rope_parameters": DYNAMIC},
            "rope",
            "rotary embeddings of type dynamic change with the longest sequence of a step",
        ),
        ("BertModel", {}, "head", "it has no output projection over tokens"),
        ("DiffLlamaForCausalLM", SIZES, "layers", "model.layers.0.self_attn attends more than once in a step"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    architecture: str, values: dict[str, Any], code: str, detail: str
) -> None:
    (reason,) = reasons(keys(architecture, **values))
    assert (reason.code, reason.detail.removeprefix("model.")) == (code, detail.removeprefix("model."))
    assert reason.remedy == "install a plugin for the architecture"


def test_layers_that_keep_other_states_are_refused() -> None:
    (reason,) = reasons(keys("Lfm2ForCausalLM", **SIZES, layer_types=["conv", "full_attention"]))
    assert reason.code in ("layers", "trace")


def test_names_that_transformers_does_not_know_are_of_another_kind() -> None:
    (reason,) = reasons({"architectures": ["NobodyForCausalLM"]})
    assert reason == Reason("kind", "kind", f"transformers {transformers.__version__} has no class 'NobodyForCausalLM'")
    assert reasons({"architectures": ["AutoModelForCausalLM"]})[0].code == "kind"
    assert reasons({"architectures": ["gguf:llama"]})[0].code == "kind"


def test_code_of_a_checkpoint_is_not_run() -> None:
    config = {"architectures": ["NobodyForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling.Nobody"}}
    (reason,) = reasons(config)
    assert reason.code == "trust_remote_code"
    assert reason.detail == "its code comes with the checkpoint, and such code is not run"


def test_a_configuration_of_another_type_is_refused() -> None:
    (reason,) = reasons({**keys("Jais2ForCausalLM", **SIZES), "model_type": "llama"})
    assert (reason.code, reason.remedy) == ("model_type", "set model_type to 'jais2'")
    (reason,) = reasons({**keys("Jais2ForCausalLM", **SIZES), "num_attention_heads": "many"})
    assert reason.code == "config"
    assert reason.detail.startswith("transformers refuses the configuration: ")


def test_quantized_experts_that_are_fused_at_load_are_refused() -> None:
    config = keys("Dots1ForCausalLM", **SIZES, **EXPERTS)
    assert reasons(config) == []
    (reason,) = reasons(config, quantization="gptq")
    assert reason.code == "quantization"
    assert reason.detail == (
        "the checkpoint is quantized (gptq), and transformers converts "
        "'model.layers.1.mlp.experts.0.down_proj.weight' at load"
    )
    assert reasons(keys("Jais2ForCausalLM", **SIZES), quantization="gptq") == []


def test_config_raises_what_check_says() -> None:
    with pytest.raises(CheckpointError, match="has an encoder and a decoder"):
        Transformers.config(JsonConfigReader(keys("BartForCausalLM")))


def test_every_key_counts_as_read() -> None:
    reader = JsonConfigReader({**keys("Jais2ForCausalLM", **SIZES), "some_key": 1, "nested": {"other": 2}})
    reader.section("nested")
    config = Transformers.config(reader)
    reader.finish()
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.max_position) == (64, 32, 2, 64)


def test_windows_are_those_of_the_masks() -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    first, second = groups(keys("MinistralForCausalLM", **SIZES, head_dim=8, **types))
    assert (first.name, first.kind, first.window, first.layers) == ("sliding_9", "sliding", 9, (0,))
    assert (second.name, second.kind, second.window, second.layers) == ("full", "full", None, (1,))
    assert (first.num_heads, first.num_kv_heads, first.head_size) == (4, 2, 8)
    assert first.features == {"gqa"}


def test_a_window_longer_than_any_sequence_is_none() -> None:
    (group,) = groups(keys("MixtralForCausalLM", **SIZES, sliding_window=64))
    assert group.window is None
    (group,) = groups(keys("MixtralForCausalLM", **SIZES, sliding_window=40))
    assert group.window == 40


def test_heads_of_values_may_have_another_size() -> None:
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
    (group,) = groups(keys("YoutuForCausalLM", **{**SIZES, "num_key_value_heads": 4}, **latent))
    assert (group.head_size, group.value_head_size, group.num_kv_heads) == (20, 16, 4)
    assert group.features == {"diff_kv"}
    assert group.scale == pytest.approx(20**-0.5)


def test_each_target_has_one_source() -> None:
    config = Transformers.config(JsonConfigReader(keys("Dots1ForCausalLM", **SIZES, **EXPERTS)))
    assert unique_targets(config.weights.rules) == []
    sources = {rule.source for rule in config.weights.rules}
    assert {"model.layers.1.mlp.experts.3.down_proj.weight", "lm_head", "model.norm.weight"} <= sources


class OwnJais2(Llama):
    """Somebody's plugin for an architecture that transformers has too."""

    name = "Jais2ForCausalLM"
    kinds = frozenset({"Jais2ForCausalLM"})
    gguf_architectures = frozenset()


def choose(*plugins: type[Plugin], architecture: str = "Jais2ForCausalLM", **settings: Any) -> Decision:
    registry = Registry()
    for plugin in plugins:
        registry.register(plugin)
    config = keys(architecture, **SIZES)
    facts = ModelFacts("model", "config", architecture, config)
    return choose_architecture(load_config(env={}, api={"model": "model", **settings}), facts, registry)


def test_a_plugin_for_the_architecture_wins() -> None:
    decision = choose(Transformers, OwnJais2)
    assert decision.plugin is OwnJais2
    (rejected,) = decision.rejected
    assert (rejected.name, rejected.reasons[0].code) == ("transformers", "rivals")
    assert rejected.reasons[0].detail == "'Jais2ForCausalLM' has a plugin of its own: Jais2ForCausalLM"


def test_without_one_the_fallback_serves_in_the_lowest_band() -> None:
    decision = choose(Transformers, Llama)
    assert (decision.plugin, decision.band, decision.how) == (Transformers, Band.FALLBACK, "auto")


def test_the_fallback_can_be_named() -> None:
    decision = choose(Transformers, OwnJais2, implementation="transformers")
    assert (decision.plugin, decision.how, decision.setting) == (Transformers, "forced", "model.implementation")


def test_another_plugin_can_be_named_too_and_must_fit() -> None:
    named = choose(Transformers, Llama, architecture="LlamaForCausalLM", implementation="LlamaForCausalLM")
    assert (named.plugin, named.how) == (Llama, "forced")
    with pytest.raises(NoCandidateError, match="'LlamaForCausalLM' was forced") as caught:
        choose(Transformers, Llama, implementation="LlamaForCausalLM")
    assert caught.value.field == "model.implementation"
    with pytest.raises(
        ConfigError, match=r"no such plugin in models: model\.implementation names 'transfomers'"
    ) as bad:
        choose(Transformers, Llama, implementation="transfomers")
    assert "did you mean 'transformers'?" in bad.value.remedy


def test_a_plugin_that_serves_another_task_is_not_replaced() -> None:
    with pytest.raises(NoCandidateError, match="the nearest is 'Jais2ForCausalLM'"):
        choose(Transformers, type("Own", (OwnJais2,), {"tasks": frozenset({"generate"})}), task="pool")
