"""Decoders with a head over labels, reward models and token-wise vectors against transformers and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engines import Engine
from hf import Tiny, random_prompts
from safetensors.torch import load_file, save_file
from torch import nn

from jackfield import LLM, PoolingParams
from jackfield.engine.save_state import save_sharded_state
from jackfield.errors import CheckpointError, ConfigError, RequestError

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Gemma": {},
    "Gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 12},
    "Phi3": {},
    "SmolLM3": {},
    "GPT2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
PROMPTS = [[id_ + 1 for id_ in prompt] for prompt in random_prompts((1, 7, 40, 23), vocab_size=150, seed=5)]
RAW = PoolingParams(task="classify", activation=False)
EACH = PoolingParams(task="token_classify", activation=False)


def make(folder: Path, family: str, **changes: Any) -> Tiny:
    sizes = {"vocab_size": 160, "pad_token_id": 0, "initializer_range": 0.2} if family == "GPT2" else SIZES
    config = getattr(transformers, f"{family}Config")(**{**sizes, **FAMILIES[family], **changes})
    torch.manual_seed(29)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).float().eval()
    model.save_pretrained(folder)
    return Tiny(folder, model)


@torch.no_grad()
def expected(tiny: Tiny, prompt: list[int]) -> torch.Tensor:
    found: torch.Tensor = tiny.model(input_ids=torch.tensor([prompt])).logits[0]
    return found


def close(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(found.copy()), wanted, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_of_decoders_equal_the_reference(engine: Engine, tmp_path: Path, family: str) -> None:
    labels = 1 if family in ("Qwen3", "GPT2") else 3
    tiny = make(tmp_path, family, num_labels=labels)
    llm = engine(tmp_path)
    assert llm.config.model.task == "pool"
    chunked = engine(tmp_path, max_num_batched_tokens=13, max_num_seqs=3)
    results = zip(PROMPTS, llm.encode(PROMPTS, RAW), llm.classify(PROMPTS), chunked.encode(PROMPTS, RAW), strict=True)
    for prompt, plain, probable, pieces in results:
        wanted = expected(tiny, prompt)
        close(plain.data, wanted)
        close(pieces.data, wanted)
        close(probable.data, wanted.sigmoid() if labels == 1 else wanted.softmax(-1))


def reward_model(folder: Path, architecture: str, layers: list[nn.Module], names: list[str], **keys: Any) -> nn.Module:
    """Save Qwen 2 with a head that its publishers keep in a file of code, and return both."""
    base = transformers.Qwen2Model(transformers.Qwen2Config(**SIZES)).float().eval()
    head = nn.Sequential(*layers)
    tensors = {f"model.{name}": tensor for name, tensor in base.state_dict().items()}
    for name, layer in zip(names, [layer for layer in layers if isinstance(layer, nn.Linear)], strict=True):
        tensors |= {f"{name}.{key}": value for key, value in layer.state_dict().items()}
    base.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture], **keys}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return nn.ModuleList([base, head])


@torch.no_grad()
def scores_of(both: Any, prompt: list[int]) -> torch.Tensor:
    """Return scores [N, L] of all tokens."""
    base, head = both
    rows: torch.Tensor = head(base(input_ids=torch.tensor([prompt])).last_hidden_state[0])
    return rows


def test_a_reward_is_the_score_of_the_last_token(engine: Engine, tmp_path: Path) -> None:
    torch.manual_seed(3)
    layers = [nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)]
    both = reward_model(tmp_path, "Qwen2ForRewardModel", layers, ["score.0", "score.2"])
    llm = engine(tmp_path)
    for prompt, one, each in zip(PROMPTS, llm.classify(PROMPTS), llm.encode(PROMPTS, EACH), strict=True):
        wanted = scores_of(both, prompt)
        close(one.data, wanted[-1])
        close(each.data, wanted)


def test_steps_are_scored_at_their_ends(engine: Engine, tmp_path: Path) -> None:
    torch.manual_seed(4)
    layers = [nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2)]
    both = reward_model(tmp_path, "Qwen2ForProcessRewardModel", layers, ["score.0", "score.2"])
    prompts = [[5, 9, 7, 7, 9, 9, 3], [9], [4, 4, 4], [*range(1, 60), 9, 8]]
    by_step = PoolingParams(task="token_classify", step_tag_id=9)
    one_label = PoolingParams(task="token_classify", step_tag_id=9, returned_token_ids=[1], activation=False)
    for llm in (engine(tmp_path), engine(tmp_path, max_num_batched_tokens=5, max_num_seqs=3)):
        found = zip(prompts, llm.encode(prompts, by_step), llm.encode(prompts, one_label), strict=True)
        for prompt, step, label in found:
            rows = scores_of(both, prompt)[torch.tensor(prompt) == 9]
            close(step.data, rows.softmax(-1))
            close(label.data, rows[:, 1:])
    assert llm.encode([[4, 4]], by_step)[0].data.shape == (0, 2)


def test_tokens_stand_for_labels_of_a_model_that_generates(engine: Engine, tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=False)
    torch.manual_seed(6)
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path)
    llm = engine(tmp_path, task="pool")
    for prompt, output in zip(PROMPTS, llm.classify(PROMPTS, returned_token_ids=[80, 7]), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        close(output.data, logits[[80, 7]].softmax(-1))
    wrong: list[tuple[PoolingParams, str]] = [
        (PoolingParams(task="classify"), "the model has no labels to score"),
        (PoolingParams(task="classify", returned_token_ids=[160]), "the model has 160 tokens"),
    ]
    for params, text in wrong:
        with pytest.raises(RequestError, match=text):
            llm.encode(PROMPTS, params)
    assert len(llm.embed(PROMPTS)) == len(PROMPTS)


@pytest.mark.parametrize(
    "values",
    [
        {"task": "classify", "step_tag_id": 3},
        {"task": "token_classify", "step_tag_id": -1},
        {"task": "token_classify", "step_tag_id": True},
        {"task": "embed", "returned_token_ids": [1]},
        {"task": "classify", "returned_token_ids": []},
        {"task": "classify", "returned_token_ids": [1, 1]},
        {"task": "classify", "returned_token_ids": ["1"]},
    ],
    ids=str,
)
def test_labels_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="must be"):
        PoolingParams(**values)


BERT = {"vocab_size": 160, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}


def bert(folder: Path, name: str = "BertModel") -> Any:
    config = transformers.BertConfig(**BERT, num_attention_heads=4, max_position_embeddings=128, initializer_range=0.2)
    torch.manual_seed(8)
    model = transformers.BertModel(config, add_pooling_layer=False).float().eval()
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text()) | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(settings))
    return model


@torch.no_grad()
def states(model: Any, prompt: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    return found


def test_colbert_gives_a_short_vector_for_each_token(engine: Engine, tmp_path: Path) -> None:
    model = bert(tmp_path, "HF_ColBERT")
    linear = torch.randn(16, 48)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": linear}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = engine(tmp_path)
    outputs = llm.encode(PROMPTS, PoolingParams(task="token_embed"))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        close(output.data, nn.functional.normalize(states(model, prompt) @ linear.t(), dim=-1))
    with pytest.raises(RequestError, match="16 dimensions"):
        llm.embed(PROMPTS, dimensions=17)


def dense(folder: Path, inputs: int, outputs: int, activation: str, *, bias: bool = True) -> nn.Linear:
    """Write a dense module as sentence-transformers does, and return it."""
    folder.mkdir()
    layer = nn.Linear(inputs, outputs, bias=bias)
    word = f"torch.nn.modules.activation.{activation}"
    config = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": word}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}, folder / "model.safetensors")
    return layer


def modules(folder: Path, *kinds: tuple[str, str]) -> None:
    paths = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(paths))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))


TRANSFORMER = ("", "sentence_transformers.models.Transformer")
POOLING = ("1_Pooling", "sentence_transformers.models.Pooling")
NORMALIZE = ("4_Normalize", "sentence_transformers.models.Normalize")


@torch.no_grad()
def test_dense_modules_come_behind_pooling(engine: Engine, tmp_path: Path) -> None:
    model = bert(tmp_path)
    torch.manual_seed(9)
    first = dense(tmp_path / "2_Dense", 48, 64, "Tanh")
    second = dense(tmp_path / "3_Dense", 64, 20, "Identity", bias=False)
    kind = "sentence_transformers.models.Dense"
    modules(tmp_path, TRANSFORMER, POOLING, ("2_Dense", kind), ("3_Dense", kind), NORMALIZE)
    llm = engine(tmp_path)
    for prompt, output, part in zip(PROMPTS, llm.embed(PROMPTS), llm.embed(PROMPTS, dimensions=6), strict=True):
        vector = second(first(states(model, prompt).mean(0)).tanh())
        close(output.data, nn.functional.normalize(vector, dim=-1))
        close(part.data, nn.functional.normalize(vector[:6], dim=-1))
    with pytest.raises(RequestError, match="20 dimensions"):
        llm.embed(PROMPTS, dimensions=21)
    # Vectors of tokens go through no module behind pooling: they are as wide as the model.
    by_token = PoolingParams(task="token_embed", dimensions=30, normalize=False)
    for prompt, output in zip(PROMPTS, llm.encode(PROMPTS, by_token), strict=True):
        close(output.data, states(model, prompt)[:, :30])
    with pytest.raises(RequestError, match="48 dimensions"):
        llm.encode(PROMPTS, PoolingParams(task="token_embed", dimensions=49))


@torch.no_grad()
def test_a_saved_state_keeps_its_modules(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    bert(folder)
    dense(folder / "2_Dense", 48, 20, "Tanh")
    modules(folder, TRANSFORMER, POOLING, ("2_Dense", "sentence_transformers.models.Dense"))
    state = save_sharded_state(str(folder), tmp_path / "state")
    for one, other in zip(engine(folder).embed(PROMPTS), engine(state).embed(PROMPTS), strict=True):
        assert np.array_equal(one.data, other.data)


@torch.no_grad()
def test_a_dense_module_without_pooling_makes_vectors_of_tokens(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bert(tmp_path)
    layer = dense(tmp_path / "1_Dense", 48, 12, "Identity", bias=False)
    modules(tmp_path, TRANSFORMER, ("1_Dense", "pylate.models.Dense.Dense"))
    llm = engine(tmp_path)
    vectors = [nn.functional.normalize(layer(states(model, prompt)), dim=-1) for prompt in PROMPTS]
    for wanted, output in zip(vectors, llm.encode(PROMPTS, PoolingParams(task="token_embed")), strict=True):
        close(output.data, wanted)
    best = float((vectors[1] @ vectors[2].t()).max(1).values.sum())
    monkeypatch.setattr(LLM, "encode", encoded_ids(LLM.encode))
    assert llm.score("1", ["2"]) == pytest.approx([best], abs=1e-4)


def encoded_ids(encode: Any) -> Any:
    """Return an ``encode`` whose texts are places of prompts, for engines without a tokenizer."""

    def by_place(self: LLM, texts: list[str], params: PoolingParams) -> Any:
        return encode(self, [PROMPTS[int(text)] for text in texts], params)

    return by_place


def test_dense_modules_that_cannot_be_are_refused(engine: Engine, tmp_path: Path) -> None:
    bert(tmp_path)
    layer = dense(tmp_path / "2_Dense", 48, 12, "Softplus")
    modules(tmp_path, TRANSFORMER, POOLING, ("2_Dense", "sentence_transformers.models.Dense"))
    with pytest.raises(CheckpointError, match="a dense module of a kind that is not supported"):
        engine(tmp_path)
    config = json.loads((tmp_path / "2_Dense" / "config.json").read_text())
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({**config, "activation_function": "Tanh"}))
    save_file({"linear.weight": layer.weight.detach()}, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises((CheckpointError, ConfigError), match="does not hold the tensors"):
        engine(tmp_path)
