"""The fallback's layers as they are built: which go through quantization, and in which types tensors are kept."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from layer_world import build_plan, environment

from jackfield.checkpoint import JsonConfigReader
from jackfield.distributed import SingleCommunicator
from jackfield.interfaces import LayerInfo, RecordLimits
from jackfield.layers.builder import LayerAttention, LayerBuilder
from jackfield.worker.worker import Worker
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_models.llama import Llama
from jackfield_models.transformers_fallback import Transformers
from jackfield_models.transformers_trace import Observed, Watch

SIZES: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def build(
    architecture: str, dtype: torch.dtype = torch.float32, kept: frozenset[str] = frozenset(), **values: Any
) -> tuple[Any, list[LayerInfo]]:
    """Return a model, and the layers whose scheme was asked for."""
    made = getattr(transformers, architecture).config_class(**SIZES, **values).to_dict()
    config = Transformers.config(JsonConfigReader({**made, "architectures": [architecture]}))
    config = replace(config, kept=kept)
    one, asked = SingleCommunicator(), list[LayerInfo]()
    groups = Transformers.attention_groups(config)
    layers = {i: LayerAttention(g.name, TorchSdpaBackend, environment(g, one)) for g in groups for i in g.layers}
    plan = replace(build_plan(one, layers), dtype=dtype, scheme=asked.append, weights=config.weights)
    return Transformers.build(config, LayerBuilder(plan)), asked


def test_every_linear_layer_is_offered_to_quantization_under_its_name_in_the_checkpoint() -> None:
    asked = build("Jais2ForCausalLM")[1]
    linears = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    expected = {f"model.layers.{i}.{name}" for i in range(2) for name in linears} | {"lm_head", "model.embed_tokens"}
    assert {info.name for info in asked} == expected
    assert all(info.sources == {"": info.name} for info in asked)


def test_a_renamed_module_is_known_by_its_name_in_the_checkpoint() -> None:
    text = {**SIZES, "model_type": "llama"}
    sight = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = transformers.LlavaConfig(text_config=text, vision_config={"model_type": "clip_vision_model", **sight})
    keys = {**made.to_dict(), "architectures": ["LlavaForConditionalGeneration"]}
    rules = {rule.target: rule.source for rule in Transformers.config(JsonConfigReader(keys)).weights.rules}
    target = "model.language_model.layers.1.mlp.up_proj"
    assert rules[target] == "language_model.model.layers.1.mlp.up_proj"
    assert not any("vision" in path for path in rules)


def test_tensors_that_must_stay_wide_do() -> None:
    values: dict[str, Any] = {**EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8}
    model = build("Dots1ForCausalLM", torch.bfloat16, **values)[0]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    narrow = [t.dtype for name, t in tensors.items() if name.endswith(("up_proj", "layernorm.weight", "q_proj.weight"))]
    wide = [t.dtype for name, t in tensors.items() if name.endswith(("correction_bias", "inv_freq"))]
    assert narrow and set(narrow) == {torch.bfloat16}
    assert wide and set(wide) == {torch.float32}
    assert not any(tensor.is_meta for tensor in tensors.values())


def test_a_layer_whose_weight_is_taken_stays_as_it_is() -> None:
    path = "model.layers.1.mlp.up_proj"
    watch = Watch({}, 64)
    seen = Observed(path, torch.nn.Linear(3, 5), watch)
    assert seen(torch.zeros(2, 4, 3)).shape == (2, 4, 5)
    assert watch.touched == set()
    assert seen.weight.shape == (5, 3)
    assert watch.touched == {path}
    model, asked = build("Jais2ForCausalLM", kept=frozenset({path}))
    assert path not in {info.name for info in asked}
    assert type(model.trunk.layers[1].mlp.up_proj) is torch.nn.Linear
    (held,) = (held for held in model.held if held.path == path)
    assert sorted(held.unfilled()) == [f"{path}.bias", f"{path}.weight"]


def test_its_steps_are_not_recorded() -> None:
    worker = Worker.__new__(Worker)
    worker._platform = SimpleNamespace(graph_api=object, records=RecordLimits())  # type: ignore[assignment]
    worker.spec = SimpleNamespace(architecture=Transformers, attention=())  # type: ignore[assignment]
    worker._record_steps(SimpleNamespace(pooler=None, drafter=None), 64)  # type: ignore[arg-type]
    worker.spec = SimpleNamespace(architecture=Llama, attention=())  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="max_num_seqs"):
        worker._record_steps(SimpleNamespace(pooler=None, drafter=None), 64)  # type: ignore[arg-type]
