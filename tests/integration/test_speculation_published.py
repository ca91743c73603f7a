"""Draft checkpoints as other tools write them: the same weights say the same drafts, whoever saved them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines import Engine, Models
from hf import Tiny, make_tiny
from safetensors.torch import load_file, save_file
from speculation_drafters import watch
from test_speculation_eagle import HEADS, INNER, KV, SIZE, VOCAB, WIDTH, Reference, Tensors, checkpoint, rms
from test_speculation_heads import drafting as with_heads
from test_speculation_heads import medusa

from jackfield import LLM, SamplingParams
from jackfield.errors import CheckpointError, JackfieldError

PROMPTS = [[5, 9, 200], [7, 31, 8, 2, 44, 90, 13, 61]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LAYER = {
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": KV,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_cache": True,
    "vocab_size": VOCAB,
}
METHODS = [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}]
LIBRARY: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 100,
    "norm_before_residual": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": METHODS,
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/model"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformer_layer_config": LAYER,
    "transformers_version": "4.57.6",
}
"""What the speculators library writes."""
LATER: dict[str, Any] = {
    **LIBRARY,
    "architectures": ["Eagle3DraftModel"],
    "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    "embed_requires_grad": True,
    "has_no_defaults_at_init": False,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "transformer_layer_config": {**LAYER, "layer_types": ["full_attention"], "sliding_window": None},
}
"""What later versions of it may write: an embedding and a norm of its own, other layers of the target."""
OPTIMIZER: dict[str, Any] = {
    **LAYER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 100,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    },
    "tie_word_embeddings": False,
}
"""What Model Optimizer writes; it counts the layers that are looked at, not those behind them."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=8, hidden_size=WIDTH)


class LaterReference(Reference):
    """The same, with states of other layers, which are normalized together, and an embedding of its own."""

    def features(self, text: list[int]) -> torch.Tensor:
        out = self.target.model(torch.tensor([text]), output_hidden_states=True)
        states = torch.cat([out.hidden_states[i][0] for i in (1, 3, 6)], -1)
        return F.linear(rms(states, self.w["input_norm.weight"]), self.w["fc.weight"])

    def run(self, embeds: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        normed = rms(features, self.w["midlayer.hidden_norm.weight"])
        x = torch.cat((rms(embeds, self.w["midlayer.input_layernorm.weight"]), normed), -1)
        stream = normed + self.attention(x)
        inner = rms(stream, self.w["midlayer.post_attention_layernorm.weight"])
        gate, up = (F.linear(inner, self.w[f"midlayer.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        return stream + F.linear(F.silu(gate) * up, self.w["midlayer.mlp.down_proj.weight"])

    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        table = self.w["embed_tokens.weight"]
        features, tokens = self.features(text[:-1]), torch.tensor(text[1:])
        for draft in [*drafts, None]:
            out = self.run(table[tokens], features)
            if draft is not None:
                tokens, features = torch.cat((tokens, torch.tensor([draft]))), torch.cat((features, out[-1:]))
        own = F.linear(rms(out[-1], self.w["norm.weight"]), self.w["lm_head.weight"])
        logits = torch.full((VOCAB,), float("-inf"))
        logits[torch.arange(len(own)) + self.w["d2t"]] = own
        return logits


def saved(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Save under the names of tools that call no layer a middle one, with a copy of an embedding."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = {name: name.replace("midlayer.", "layers.0.") for name in tensors}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def eagle(engine: Engine, target: Tiny, folder: Path) -> LLM:
    speculative = {"speculative.method": "eagle3", "speculative.model": str(folder)}
    speculative |= {"speculative.num_speculative_tokens": 3, "speculative.adaptive": False}
    return engine(target.folder, **speculative)


@pytest.mark.parametrize("form", ["library", "later", "optimizer"])
def test_eagle3_of_other_tools(engine: Engine, target: Tiny, tmp_path: Path, form: str) -> None:
    _, tensors = checkpoint(tmp_path / "first", three=True)
    generator = torch.Generator().manual_seed(8)
    embedding = torch.randn((VOCAB, WIDTH), generator=generator) * 0.3
    reference: Reference = Reference(target, tensors, three=True)
    if form != "optimizer":
        tensors = {**tensors, "embed_tokens.weight": embedding}
    if form == "later":
        tensors["input_norm.weight"] = 1.0 + torch.randn(3 * WIDTH, generator=generator) * 0.2
        reference = LaterReference(target, tensors, three=True)
    config = {"library": LIBRARY, "later": LATER, "optimizer": OPTIMIZER}[form]
    llm = eagle(engine, target, saved(tmp_path / "draft", config, tensors))
    seen = watch(llm)
    found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert found == [o.outputs[0].token_ids for o in engine(target.folder).generate(PROMPTS, GREEDY)]
    compared = 0
    with torch.no_grad():
        for text, drafts in seen[:20]:
            for place, draft in enumerate(drafts):
                logits = reference.logits(text, drafts[:place])
                assert float(logits.max() - logits[draft]) < 1e-3, place
                compared += 1
    assert compared > 30


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"transformer_layer_config": {**LAYER, "layer_types": ["sliding_attention"], "sliding_window": 8}}, "windows"),
    ({"transformer_layer_config": {**LAYER, "use_sliding_window": True, "sliding_window": 8}}, "windows"),
    ({"norm_output": True}, "nothing reads these keys of the configuration: norm_output = True"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=range(len(REFUSED)))
def test_layers_that_are_no_eagle3_are_refused(
    engine: Engine, target: Tiny, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    _, tensors = checkpoint(tmp_path / "first", three=True)
    with pytest.raises(CheckpointError, match=message) as caught:
        eagle(engine, target, saved(tmp_path / "draft", {**LIBRARY, **changes}, tensors))
    assert caught.value.field and caught.value.remedy


def test_other_settings_of_the_optimizer_are_refused(engine: Engine, target: Tiny, tmp_path: Path) -> None:
    _, tensors = checkpoint(tmp_path / "first", three=True)
    section = {**OPTIMIZER["eagle_config"], "use_aux_hidden_state": False}
    with pytest.raises(CheckpointError, match="another use_aux_hidden_state than True") as caught:
        eagle(engine, target, saved(tmp_path / "draft", {**OPTIMIZER, "eagle_config": section}, tensors))
    assert caught.value.field == "eagle_config.use_aux_hidden_state" and caught.value.remedy


AUTHORS = {
    "medusa_num_heads": 3,
    "base_model_name_or_path": "some/model",
    "transformers_version": "4.34.1",
    "version": "2",
}
"""What the authors of Medusa write: no architecture, and no sizes."""


@pytest.mark.parametrize("container", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("start", ["", "medusa_head."])
def test_medusa_of_its_authors(engine: Engine, models: Models, tmp_path: Path, container: str, start: str) -> None:
    """The same heads in the names of today and in the authors' say the same."""
    today, _ = medusa(tmp_path / "today", depth=2, bias=True)
    tensors = {}
    for name, tensor in load_file(today / "model.safetensors").items():
        kind, head, *rest = name.split(".")
        place = f"{rest[1]}.linear.{rest[2]}" if kind == "blocks" else "2.weight"
        tensors[f"{start}{head}.{place}"] = tensor
    folder = tmp_path / "authors"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**AUTHORS, "medusa_num_layers": 2}))
    if container.endswith(".pt"):
        torch.save(tensors, folder / container)
    else:
        save_file(tensors, folder / container)
    answers, drafts = [], []
    for draft in (today, folder):
        llm = with_heads(engine, models["llama"].folder, "medusa", draft)
        seen = watch(llm)
        answers.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)])
        drafts.append(seen)
    assert answers[0] == answers[1] and drafts[0] == drafts[1]
    assert sum(len(ids) for _, ids in drafts[0]) > 30


def test_medusa_for_a_target_of_another_size(engine: Engine, models: Models, tmp_path: Path) -> None:
    """Sizes that a configuration does not say are the target's, and tensors must have them."""
    folder = tmp_path / "authors"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**AUTHORS, "medusa_num_heads": 1}))
    tensors = {
        "0.0.linear.weight": torch.zeros(8, 8),
        "0.0.linear.bias": torch.zeros(8),
        "0.1.weight": torch.zeros(9, 8),
    }
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    with pytest.raises(JackfieldError, match="does not fit"):
        with_heads(engine, models["llama"].folder, "medusa", folder, **{"speculative.num_speculative_tokens": 1})
