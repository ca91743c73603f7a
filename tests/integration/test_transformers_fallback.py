"""The fallback against transformers' own forward pass, and what people see of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from engines import Engine
from fallback_models import RECIPES
from hf import assert_equal, changed_copy, random_prompts
from test_models_hf import GREEDY, LENGTHS, check_logprobs
from tiny_models import WINDOW

from jackfield.cli import main
from jackfield.errors import CheckpointError
from jackfield_models.transformers_fallback import COST

FORCED = {"implementation": "transformers"}
OWN_NONE = "jais2"
"""A model whose architecture no plugin names."""


@pytest.mark.parametrize("name", RECIPES)
def test_logits_and_tokens_equal_the_reference(engine: Engine, tmp_path: Path, name: str) -> None:
    tiny = RECIPES[name].make(tmp_path)
    llm = engine(tiny.folder, block_size=8, long_prefill_token_threshold=7, max_num_seqs=8, **FORCED)
    check_logprobs(llm, tiny, random_prompts((WINDOW + 12,), seed=3)[0])
    prompts = random_prompts(LENGTHS)
    batch = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    assert [len(output) for output in batch] == [32] * len(prompts)
    assert_equal(tiny.model, prompts, batch)
    again = llm.generate([[*prompts[-1], 5]], GREEDY)[0]
    assert (again.num_cached_tokens or 0) >= 2 * WINDOW
    assert_equal(tiny.model, [[*prompts[-1], 5]], [again.outputs[0].token_ids])


def test_a_small_change_of_the_configuration_is_noticed(engine: Engine, tmp_path: Path) -> None:
    """Without this the checks above would hold for nothing."""
    tiny = RECIPES[OWN_NONE].make(tmp_path / "model")
    wrong = changed_copy(tiny.folder, tmp_path / "wrong", layer_norm_eps=0.01)
    with pytest.raises(AssertionError):
        check_logprobs(engine(Path(wrong), **FORCED), tiny, random_prompts((30,))[0])


def test_it_is_chosen_where_there_is_nothing_else(engine: Engine, tmp_path: Path) -> None:
    llm = engine(RECIPES[OWN_NONE].make(tmp_path).folder)
    (decision,) = (d for d in llm.report.decisions if d.family == "models")
    assert (decision.name, decision.how, decision.band.name) == ("transformers", "auto", "FALLBACK")
    (group,) = (d for d in llm.report.decisions if d.family == "attention_backends")
    assert group.band.name != "FALLBACK" or group.name == "torch_sdpa"


def test_a_model_without_weights_gets_random_ones(engine: Engine, tmp_path: Path) -> None:
    tiny = RECIPES["dots1"].make(tmp_path)
    (tiny.folder / "model.safetensors").unlink()
    llm = engine(tiny.folder, load_format="dummy", **FORCED)
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids) == 32


def test_tensors_that_nothing_takes_and_absent_ones_are_errors(engine: Engine, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = RECIPES["dots1"].make(tmp_path).folder / "model.safetensors"
    tensors = load_file(file)
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({name: t for name, t in tensors.items() if name != expert}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(f"[{expert}]")):
        engine(tmp_path, **FORCED)
    save_file({**tensors, "model.extra.weight": tensors[expert].clone()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 checkpoint tensors are used by nothing: model\.extra\.weight"):
        engine(tmp_path, **FORCED)


def test_explain_shows_the_fallback_and_its_cost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(RECIPES[OWN_NONE].make(tmp_path).folder)
    assert main(["explain", folder]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert any(row[:4] == ["models", "for", "target", "transformers"] and "FALLBACK" in row for row in rows)
    assert main(["explain", folder, "--json"]) == 0
    (made,) = (d for d in json.loads(capsys.readouterr().out)["decisions"] if d["family"] == "models")
    assert made["request"]["kind"] == "Jais2ForCausalLM"
    assert "config" not in made["request"]
    assert COST in json.dumps(made, ensure_ascii=False)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the answer of ``jackfield models NAME``."""
    code = main(["models", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_models_tells_how_one_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, row = told(capsys, "Jais2ForCausalLM")
    assert (code, row["how"], row["plugin"]) == (0, "fallback", "transformers")
    assert row["why"].startswith("the fallback: runs transformers' own modules")
    code, row = told(capsys, "LlamaForCausalLM")
    assert (code, row["how"], row["plugin"]) == (0, "native", "LlamaForCausalLM")
    code, row = told(capsys, "BartForCausalLM")
    assert (code, row["how"]) == (1, "not")
    assert row["why"].endswith("encoder_decoder: it has an encoder and a decoder")
    code, row = told(capsys, str(RECIPES["nanochat"].make(tmp_path).folder))
    assert (code, row["architecture"], row["how"]) == (0, "NanoChatForCausalLM", "fallback")
    code, row = told(capsys, "LlamaForCausalLM", "--implementation", "transformers")
    assert (code, row["how"]) == (0, "fallback")


def test_models_prints_lines_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "LlamaForCausalLM"]) == 0
    assert capsys.readouterr().out == "architecture: LlamaForCausalLM\nhow: native\nplugin: LlamaForCausalLM\n"
