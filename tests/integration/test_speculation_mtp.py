"""Layers of the target's checkpoint that only draft, on random checkpoints in the published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, Models
from hf import assert_equal, random_prompts
from mtp_models import FIRST, MtpTiny, always_right, make_mtp, same_layer
from quantized_models import quantized
from quantized_writers import FORMATS
from safetensors.torch import load_file, save_file
from speculation_drafters import watch
from test_speculation_options import LENGTH, answers, assert_same
from text_model import add_tokenizer

from jackfield import LLM, SamplingParams
from jackfield.errors import CheckpointError, ConfigError, NoCandidateError

PROMPTS = random_prompts((3, 7, 18, 41))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
QUICK = ("deepseek-v3", "glm4-moe", "qwen3-next")
SLOW = ("deepseek-v3.2", "qwen3.5", "qwen3.5-moe")
NAMES = (*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
Make = Callable[[str], MtpTiny]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, MtpTiny] = {}

    def once(name: str) -> MtpTiny:
        if name not in made:
            made[name] = make_mtp(tmp_path_factory.mktemp(name), name)
        return made[name]

    return once


def drafting(engine: Engine, folder: Path, **settings: Any) -> LLM:
    mtp = {"speculative.method": "mtp", "speculative.num_speculative_tokens": 3, "speculative.adaptive": False}
    return engine(folder, **{**mtp, **settings})


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def record(llm: LLM) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Return a list that fills with texts, the drafts behind them, and the logits that the next draft comes from."""
    runner = llm._core._executor.worker._runner  # type: ignore[attr-defined]
    drafter, tables = runner._speculation._drafter, runner._parts.batch.tokens
    propose = drafter.propose
    seen: list[tuple[list[int], list[int], torch.Tensor]] = []

    def spy(batch: Any) -> Any:
        draw, places = batch.draw, []

        def drawn(logits: torch.Tensor, place: int) -> torch.Tensor:
            places.append(logits.clone())
            return draw(logits, place)  # type: ignore[no-any-return]

        batch.draw = drawn
        drafts = propose(batch)
        for row, (slot, length) in enumerate(zip(batch.slots.tolist(), batch.lengths.tolist(), strict=True)):
            found = [token for token in drafts.ids[row].tolist() if token >= 0]
            text = tables[slot, :length].tolist()
            seen.extend((text, found[:place], places[place][row]) for place in range(len(found)))
        return drafts

    drafter.propose = spy
    return seen


SETUPS: dict[str, dict[str, Any]] = {
    "plain": {"enable_prefix_caching": False},
    "chunks": {"long_prefill_token_threshold": 5, "block_size": 16},
    "a small budget": {"max_num_batched_tokens": 19, "enable_prefix_caching": False},
    "few blocks": {"block_size": 16, "num_blocks": 12, "kv_cache_memory": None, "max_model_len": 80},
}
FEW = {"qwen3-next": 24, "qwen3.5": 24, "qwen3.5-moe": 24, "deepseek-v3": 9, "glm4-moe": 9, "deepseek-v3.2": 9}
"""Blocks that all requests together do not fit into."""


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_references_and_tokens_those_without_drafts(
    engine: Engine, make: Make, name: str, setup: str
) -> None:
    tiny, settings = make(name), dict(SETUPS[setup])
    if setup == "few blocks":
        settings["num_blocks"] = FEW[name]
    expected = tokens(engine(tiny.folder))
    assert_equal(tiny.model, PROMPTS, expected)
    llm = drafting(engine, tiny.folder, **settings)
    seen = record(llm)
    assert tokens(llm) == expected
    assert (llm.get_metrics().preemptions > 0) == (setup == "few blocks")
    places = set()
    with torch.no_grad():
        for text, drafts, logits in seen[:60] + seen[-20:]:
            torch.testing.assert_close(logits, tiny.drafts(text, drafts), rtol=1e-4, atol=2e-4)
            places.add(len(drafts))
    assert places == {0, 1, 2}


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_of_the_cache_changes_no_token(engine: Engine, make: Make, name: str) -> None:
    tiny = make(name)
    expected = tokens(engine(tiny.folder))
    llm = drafting(engine, tiny.folder, block_size=16)
    assert tokens(llm) == expected
    longer = [[*prompt, *answer[:20]] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert tokens(llm, longer, short) == [answer[20:] for answer in expected]
    assert llm.get_metrics().prefix_hits > 0


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next"])
def test_every_option_gives_what_it_gives_without_drafts(engine: Engine, tmp_path: Path, name: str) -> None:
    """Drafts are certain here: then a seed gives what it gives without."""
    tiny = make_mtp(tmp_path, name, eos_token_id=256)
    add_tokenizer(tiny.folder)
    shared = {"max_model_len": LENGTH, "skip_tokenizer_init": False}
    right = answers(engine(tiny.folder, **shared))
    llm = drafting(engine, tiny.folder, **shared, **{"speculative.draft_sample_method": "greedy"})
    assert_same(answers(llm), right)
    assert llm.get_metrics().drafts_proposed > 100


@pytest.mark.parametrize("name", NAMES)
def test_drafts_that_must_be_right_are_kept(engine: Engine, tmp_path: Path, name: str) -> None:
    tiny = make_mtp(tmp_path, name, always_right)
    llm = drafting(engine, tiny.folder)
    assert tokens(llm) == tokens(engine(tiny.folder))
    metrics = llm.get_metrics()
    assert metrics.drafts_accepted == metrics.drafts_proposed > 50


KEPT: dict[str, dict[str, Any]] = {
    "plain": {},
    # Prompts begin alike: with a cached first token, what the layer has of it was made with another second token.
    "blocks of 1": {"block_size": 1, "enable_prefix_caching": False},
    "chunks": {"long_prefill_token_threshold": 5},
    "a small budget": {"max_num_batched_tokens": 16},
    "few blocks": {"block_size": 4, "num_blocks": 30, "kv_cache_memory": None, "max_model_len": 96},
    "one at a time": {"max_num_seqs": 1},
    "many drafts": {"speculative.num_speculative_tokens": 9},
}


OFTEN = ("plain", "chunks", "few blocks")


@pytest.mark.parametrize(
    "setup", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in KEPT]
)
@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_a_layer_that_is_the_targets_has_all_drafts_kept(engine: Engine, tmp_path: Path, name: str, setup: str) -> None:
    """Every draft that was refused would show a cache of the layer that is not what it should be."""
    values = {"q_lora_rank": None} if name == "deepseek-v3" else {"use_qk_norm": False}
    tiny = make_mtp(tmp_path, name, same_layer, layers=1, first_k_dense_replace=0, **values)
    prompts = [[FIRST, *prompt] for prompt in PROMPTS]
    expected = tokens(engine(tiny.folder), prompts)
    llm = drafting(engine, tiny.folder, **KEPT[setup])
    for _ in range(2):
        assert tokens(llm, prompts) == expected
    metrics = llm.get_metrics()
    assert metrics.drafts_accepted == metrics.drafts_proposed > 50
    assert (metrics.preemptions > 0) == (setup == "few blocks")
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, logit_bias={FIRST: -100.0})
    tokens(llm, prompts, drawn)
    after = llm.get_metrics()
    kept = after.drafts_accepted - metrics.drafts_accepted
    assert kept > 0.9 * (after.drafts_proposed - metrics.drafts_proposed) > 0


def test_embedding_and_head_are_the_targets(engine: Engine, make: Make) -> None:
    llm = drafting(engine, make("deepseek-v3").folder)
    module = llm._core._executor.worker._runner._speculation._drafter._drafts._module  # type: ignore[attr-defined]
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    assert shapes and (260, 48) not in shapes


def test_a_report_names_the_layers_parts(engine: Engine, make: Make) -> None:
    llm = drafting(engine, make("deepseek-v3").folder, **{"attention.components": {"drafter": {"force": "torch_mla"}}})
    parts = {d.family: d.name for d in llm.report.decisions if d.request.get("component") == "drafter"}
    assert parts["models"] == "DeepSeekMTPModel"
    assert parts["attention_backends"] == "torch_mla"
    assert {"quantization_methods", "moe_experts"} <= parts.keys()


def test_words_on_the_checkpoint_are_about_the_layer_too(engine: Engine, make: Make) -> None:
    tiny = make("glm4-moe")
    words = {
        "quantization.force": "int8",
        "moe.force": "torch",
        "implementation": "Glm4MoeForCausalLM",
    }
    llm = drafting(engine, tiny.folder, **words)
    parts = [(d.family, d.name) for d in llm.report.decisions if d.request.get("component") == "drafter"]
    assert ("quantization_methods", "int8") in parts
    assert ("moe_experts", "torch") in parts
    assert tokens(llm) == tokens(engine(tiny.folder, **words))


@pytest.mark.parametrize(
    ("name", "stored"), [("deepseek-v3", "fp8-tensor"), pytest.param("qwen3-next", "fp8-block", marks=pytest.mark.slow)]
)
def test_a_quantized_layer_drafts_what_its_values_draft(
    engine: Engine, make: Make, tmp_path: Path, name: str, stored: str
) -> None:
    """What joins the token and the state is stored as it is, as published checkpoints have it."""
    kind = FORMATS[stored]
    packed, plain = quantized(make(name).folder, tmp_path, kind.write, kind.config, attention_and_experts)
    layer = "model.layers.2." if name == "deepseek-v3" else "mtp.layers.0."
    stored_so = set(load_file(packed / "model.safetensors")) - set(load_file(plain / "model.safetensors"))
    assert any(tensor.startswith(f"{layer}self_attn") for tensor in stored_so)
    assert any(tensor.startswith(f"{layer}mlp.experts.") for tensor in stored_so)
    seen = []
    for folder in (packed, plain):
        llm = drafting(engine, folder, max_model_len=128)
        drafts = watch(llm)
        seen.append((tokens(llm), sorted(drafts)))
    assert seen[0] == seen[1]
    assert sum(len(drafts) for _, drafts in seen[0][1]) > 100


def attention_and_experts(name: str) -> bool:
    return name.endswith("_proj") and "eh_proj" not in name


def test_made_up_weights_have_a_layer_too(engine: Engine, make: Make) -> None:
    llm = drafting(engine, make("qwen3-next").folder, load_format="dummy")
    tokens(llm)
    assert llm.get_metrics().drafts_proposed > 0


def rewritten(tiny: MtpTiny, folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **keys: Any) -> Path:
    """Save a checkpoint with other tensors and keys."""
    tensors = load_file(tiny.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


@pytest.mark.parametrize(("name", "layer"), [("deepseek-v3", "model.layers.2."), ("qwen3-next", "mtp.")])
def test_a_checkpoint_without_such_a_layer_is_refused(
    engine: Engine, make: Make, tmp_path: Path, name: str, layer: str
) -> None:
    def without(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in [tensor for tensor in tensors if tensor.startswith(layer)]:
            del tensors[tensor]

    folder = rewritten(make(name), tmp_path, without)
    with pytest.raises(ConfigError, match="has no layers that only draft") as caught:
        drafting(engine, folder)
    assert caught.value.field == "speculative.method"


def test_tensors_of_the_layer_do_not_vanish(engine: Engine, make: Make, tmp_path: Path) -> None:
    def changed(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.eh_proj.bias"] = torch.zeros(48)

    folder = rewritten(make("glm4-moe"), tmp_path, changed)
    tokens(engine(folder))
    with pytest.raises(CheckpointError, match=r"used by nothing: model\.layers\.2\.eh_proj\.bias"):
        drafting(engine, folder)


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_layers_is_refused(engine: Engine, make: Make, tmp_path: Path, count: int) -> None:
    folder = rewritten(make("deepseek-v3"), tmp_path, lambda tensors: None, num_nextn_predict_layers=count)
    with pytest.raises(CheckpointError, match=f"has {count} layers that only draft, and one can be run") as caught:
        drafting(engine, folder)
    assert caught.value.field == "config.json: num_nextn_predict_layers"


def test_an_architecture_without_such_layers_is_refused(engine: Engine, models: Models) -> None:
    with pytest.raises(NoCandidateError, match="draft_layers") as caught:
        drafting(engine, models["llama"].folder)
    assert "no plugin builds such layers for LlamaForCausalLM" in str(caught.value)


def test_it_takes_no_other_checkpoint(engine: Engine, make: Make, models: Models) -> None:
    with pytest.raises(ConfigError, match="drafter mtp needs no draft model"):
        drafting(engine, make("deepseek-v3").folder, **{"speculative.model": str(models["llama"].folder)})


def test_the_layer_is_no_model_of_its_own(engine: Engine, make: Make, tmp_path: Path) -> None:
    folder = rewritten(make("deepseek-v3"), tmp_path, lambda tensors: None, architectures=["DeepSeekMTPModel"])
    with pytest.raises(NoCandidateError, match="drafts for another model"):
        engine(folder)
