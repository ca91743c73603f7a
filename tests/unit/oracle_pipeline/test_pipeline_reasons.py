"""The reasons that the pipeline itself gives, and the errors they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import ConfigError, NoCandidateError
from jackfield.interfaces import BlockSizes, Reason
from jackfield.oracle.codes import ENVIRONMENT_CODES
from jackfield.oracle.verdict import Decision
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_models.llama import Llama
from jackfield_spec_decode.ngram import NgramDrafter
from oracle_pipeline.bench import decision_of, fitting, run

ONLY_64 = fitting("only_64", block_sizes=BlockSizes(only=(64,)))


def reasons(decision: Decision, name: str) -> tuple[str, tuple[Reason, ...]]:
    (verdict,) = (verdict for verdict in decision.verdicts if verdict.name == name)
    return verdict.stage, verdict.reasons


def test_every_code_of_the_pipeline_is_expected_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [code for code in ENVIRONMENT_CODES if f'Reason("{code}"' not in text and f"{code}: " not in text] == []


def test_task() -> None:
    pooling = type("Pooling", (Llama,), {"tasks": frozenset({"pool", "encode"})})
    with pytest.raises(NoCandidateError) as caught:
        run(pooling, without=(Llama,), task="generate")
    error = caught.value
    assert error.message == (
        "no plugin fits models for target (LlamaForCausalLM); the nearest is 'LlamaForCausalLM' ((in process)): "
        "task: 'generate' is not one of encode, pool"
    )
    assert (error.field, error.value) == ("model", "LlamaForCausalLM")
    assert "rejected: environment" in error.table


def test_the_task_is_what_an_architecture_is_made_for() -> None:
    pooling = type("Pooling", (Llama,), {"tasks": frozenset({"pool"})})
    assert run(pooling, without=(Llama,)).config.model.task == "pool"
    assert run().config.model.task == "generate"
    found = run(task="pool")
    assert found.config.model.task == "pool" and found.pooler is not None


def test_block_size_of_the_user() -> None:
    decision = decision_of(run(ONLY_64, block_size=16), "attention_backends")
    assert decision.name == "torch_sdpa"
    remedy = "leave cache.block_size out, or use a size that only_64 takes"
    assert reasons(decision, "only_64") == (
        "environment",
        (Reason("block_size", "block_size", "no layout for blocks of 16 tokens", remedy),),
    )


def test_block_size_of_a_platform_rejects_nobody() -> None:
    resolution = run(ONLY_64, attention="only_64")
    assert resolution.config.cache.block_size == 64
    assert resolution.attention[0].request.block_size == 64
    assert any(p.field == "cache.block_size" and p.value == 32 for p in resolution.report.proposals)


def test_forced_with_an_impossible_block_size() -> None:
    with pytest.raises(NoCandidateError) as caught:
        run(ONLY_64, attention="only_64", block_size=16)
    assert caught.value.message == (
        "'only_64' was forced for attention_backends for target, full, but cannot serve it: "
        "block_size: no layout for blocks of 16 tokens"
    )
    assert caught.value.field == "attention.force"


def test_no_cache_layout() -> None:
    empty = fitting("empty", cache_specs=classmethod(lambda cls, request: []))
    decision = decision_of(run(empty), "attention_backends")
    detail = "no layout for a cache of float32"
    expected = Reason("no_cache_layout", "cache_dtype", detail, "leave cache.cache_dtype out")
    assert reasons(decision, "empty") == ("environment", (expected,))


def test_layout_check_that_raises_is_the_plugins_fault() -> None:
    def broken(cls: Any, request: Any) -> Any:
        raise ZeroDivisionError("no heads")

    decision = decision_of(run(fitting("broken", cache_specs=classmethod(broken))), "attention_backends")
    stage, (reason,) = reasons(decision, "broken")
    assert (stage, reason.code, reason.detail) == ("environment", "probe_raised", "ZeroDivisionError: no heads")


def test_need_of_a_drafter() -> None:
    eager = type("Eager", (NgramDrafter,), {"name": "eager", "kinds": frozenset({"eager"})})
    needy = type("Needy", (eager,), {"name": "eager", "needs": frozenset({"moods", "draft_checkpoint", "tokens"})})
    assert run(eager, speculative={"method": "eager"}).drafter is not None
    with pytest.raises(NoCandidateError) as caught:
        run(needy, speculative={"method": "eager"})
    assert caught.value.message == (
        "'eager' was forced for drafters for target, eager, but cannot serve it: "
        "need: it needs draft_checkpoint, which this engine does not offer; "
        "need: it needs moods, which this engine does not offer"
    )
    assert caught.value.field == "speculative.method"


def test_a_section_that_would_do_nothing() -> None:
    with pytest.raises(ConfigError) as caught:
        run(moe="torch")
    assert caught.value.message == "moe has a choice, but the model has no experts"
    assert (caught.value.field, caught.value.value, caught.value.remedy) == ("moe", "torch", "remove moe")


def test_nobody_serves_a_kind_of_layer() -> None:
    with pytest.raises(NoCandidateError) as caught:
        run(without=(TorchSdpaBackend,))
    assert caught.value.message == "no plugin fits attention_backends for target, full: none serves 'full'"
    assert caught.value.remedy.startswith("no plugin of this family is installed")
