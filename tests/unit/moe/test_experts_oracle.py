"""Which experts backend is chosen where, and why the others are not: a table of devices, types, layouts and blocks."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.config.selection import ResolvedSelection
from jackfield.errors import NoCandidateError
from jackfield.interfaces import DeviceFacts, MoEConfig, Reason
from jackfield.interfaces.moe import ExpertsRequest, experts_request
from jackfield.oracle import Decision, decide
from jackfield.registry import Registry
from jackfield_moe.gluon_experts import GluonExperts
from jackfield_moe.torch_experts import TorchExperts
from jackfield_moe.torch_grouped import TorchGrouped
from jackfield_moe.triton_experts import TritonExperts

DEVICES = {
    "cpu": DeviceFacts("cpu"),
    "xpu": DeviceFacts("xpu"),
    **{f"cuda{a}.{b}": DeviceFacts("cuda", capability=(a, b)) for a, b in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0))},
}
BLOCK = {"num_experts": 64, "top_k": 8, "hidden_size": 2048, "intermediate_size": 1024}
NO_CPU, NO_XPU = (f"device: '{name}' is not among 'cuda'" for name in ("cpu", "xpu"))
NO_FP8, NO_INT8, NO_INT4, NO_MXFP4 = (f"kind: '{x}' is not among 'dense'" for x in ("fp8", "int8", "int4", "mxfp4"))
NO_HALF, NO_SINGLE, NO_DOUBLE = (f"dtype: 'float{x}' is not among 'bfloat16'" for x in (16, 32, 64))
NO_DOUBLES = "dtype: 'float64' is not among 'bfloat16', 'float16', 'float32'"
NO_PARTIAL = "feature: does not declare the feature 'partial'"
NO_MISH = (
    "activation: 'mish' is not one of gelu, gelu_accurate, gelu_fast, gelu_new, gelu_python, gelu_python_tanh, "
    "gelu_pytorch_tanh, gelu_tanh, relu, relu2, silu, situ, swiglu_oai, swiglu_step, swish"
)
OLD_8, OLD_75, OLD_89 = (f"capability: {x} is below 9.0" for x in ("8.0", "7.5", "8.9"))
CLAMPED = {"bias": True, "activation": "swiglu_oai"}
PLAIN = {"gated": False, "activation": "relu2"}

Row = tuple[str, str, str, dict[str, Any], str, str, str]
TABLE: list[Row] = [
    # device, type, layout, block, winner, why not torch_grouped, why not triton
    ("cpu", "bfloat16", "dense", {}, "torch", NO_CPU, NO_CPU),
    ("xpu", "bfloat16", "dense", {}, "torch", NO_XPU, NO_XPU),
    ("cuda7.5", "bfloat16", "dense", {}, "torch", OLD_75, "capability: 7.5 is below 8.0"),
    ("cuda8.0", "bfloat16", "dense", {}, "triton", OLD_8, ""),
    ("cuda8.9", "bfloat16", "dense", {}, "triton", OLD_89, ""),
    ("cuda9.0", "bfloat16", "dense", {}, "triton", "", ""),
    ("cuda10.0", "bfloat16", "dense", {}, "triton", "", ""),
    ("cpu", "float16", "dense", {}, "torch", f"{NO_CPU}; {NO_HALF}", NO_CPU),
    ("cpu", "float32", "dense", {}, "torch", f"{NO_CPU}; {NO_SINGLE}", NO_CPU),
    ("cpu", "float64", "dense", {}, "torch", f"{NO_CPU}; {NO_DOUBLE}", f"{NO_CPU}; {NO_DOUBLES}"),
    ("cuda8.0", "float16", "dense", {}, "triton", NO_HALF, ""),
    ("cuda8.0", "float32", "dense", {}, "triton", NO_SINGLE, ""),
    ("cuda8.0", "float64", "dense", {}, "torch", NO_DOUBLE, NO_DOUBLES),
    ("cuda9.0", "float16", "dense", {}, "triton", NO_HALF, ""),
    ("cuda9.0", "float32", "dense", {}, "triton", NO_SINGLE, ""),
    ("cuda9.0", "float64", "dense", {}, "torch", NO_DOUBLE, NO_DOUBLES),
    ("cpu", "bfloat16", "fp8", {}, "torch", f"{NO_CPU}; {NO_FP8}", NO_CPU),
    ("cuda7.5", "bfloat16", "fp8", {}, "torch", NO_FP8, "capability: 7.5 is below 8.9"),
    ("cuda8.0", "bfloat16", "fp8", {}, "torch", NO_FP8, "capability: 8.0 is below 8.9"),
    ("cuda8.9", "bfloat16", "fp8", {}, "triton", NO_FP8, ""),
    ("cuda9.0", "bfloat16", "fp8", {}, "triton", NO_FP8, ""),
    ("cuda9.0", "float16", "fp8", {}, "triton", f"{NO_HALF}; {NO_FP8}", ""),
    ("cpu", "bfloat16", "int8", {}, "torch", f"{NO_CPU}; {NO_INT8}", NO_CPU),
    ("cuda8.0", "bfloat16", "int8", {}, "triton", NO_INT8, ""),
    ("cuda9.0", "bfloat16", "int8", {}, "triton", NO_INT8, ""),
    ("cpu", "bfloat16", "int4", {}, "torch", f"{NO_CPU}; {NO_INT4}", NO_CPU),
    ("cuda8.0", "bfloat16", "int4", {}, "triton", NO_INT4, ""),
    ("cuda9.0", "bfloat16", "int4", {}, "triton", NO_INT4, ""),
    ("cpu", "bfloat16", "mxfp4", {}, "torch", f"{NO_CPU}; {NO_MXFP4}", NO_CPU),
    ("cuda8.0", "bfloat16", "mxfp4", {}, "triton", NO_MXFP4, ""),
    ("cuda9.0", "bfloat16", "mxfp4", {}, "triton", NO_MXFP4, ""),
    ("cuda9.0", "bfloat16", "mxfp4", {"intermediate_size": 2880}, "triton", NO_MXFP4, ""),
    ("cpu", "bfloat16", "dense", CLAMPED, "torch", NO_CPU, NO_CPU),
    ("cpu", "bfloat16", "dense", PLAIN, "torch", NO_CPU, NO_CPU),
    ("cpu", "bfloat16", "dense", {"partial": True}, "torch", f"{NO_CPU}; {NO_PARTIAL}", NO_CPU),
    ("cuda9.0", "bfloat16", "dense", CLAMPED, "triton", "", ""),
    ("cuda9.0", "bfloat16", "dense", PLAIN, "triton", "", ""),
    ("cuda9.0", "bfloat16", "dense", {"partial": True}, "triton", NO_PARTIAL, ""),
    ("cuda8.0", "bfloat16", "dense", {"partial": True, **CLAMPED}, "triton", NO_PARTIAL, ""),
    ("cuda9.0", "bfloat16", "dense", {"activation": "gelu_pytorch_tanh"}, "triton", "", ""),
    ("cuda9.0", "bfloat16", "dense", {"activation": "mish"}, "torch_grouped", "", NO_MISH),
    ("cuda8.0", "bfloat16", "dense", {"activation": "mish"}, "torch", OLD_8, NO_MISH),
    ("cuda9.0", "bfloat16", "fp8", {"activation": "mish"}, "torch", NO_FP8, NO_MISH),
    ("cuda9.0", "bfloat16", "dense", {"hidden_size": 2044}, "triton", "hidden_size: 2044 is no multiple of 8", ""),
    (
        *("cuda9.0", "bfloat16", "dense", {"hidden_size": 2044, "intermediate_size": 770}, "triton"),
        "hidden_size: 2044 is no multiple of 8; intermediate_size: 770 is no multiple of 8",
        "",
    ),
    ("cuda9.0", "bfloat16", "dense", {"intermediate_size": 768, "ranks": 8}, "triton", "", ""),
    (
        *("cuda9.0", "bfloat16", "dense", {"intermediate_size": 96, "ranks": 8}, "triton"),
        "intermediate_size: 12 is no multiple of 8",
        "",
    ),
    ("cuda9.0", "bfloat16", "dense", {"num_experts": 4096}, "triton", "", ""),
    (
        *("cuda9.0", "bfloat16", "dense", {"num_experts": 5000}, "torch_grouped", ""),
        "num_experts: 5000 is more than 4096",
    ),
    (
        *("cuda8.0", "float32", "dense", {"num_experts": 5000, "activation": "mish", "bias": True}, "torch", NO_SINGLE),
        f"{NO_MISH}; num_experts: 5000 is more than 4096",
    ),
]

NOBODY: list[tuple[str, str, dict[str, Any], str]] = [
    # device, layout, block, the reason that all of them have
    ("cuda9.0", "dense", {"activation": "swiglu_oai", "gated": False}, "swiglu_oai multiplies two projections"),
    ("cpu", "dense", {"activation": "situ", "gated": False}, "situ multiplies two projections"),
    ("cuda9.0", "int4", {"hidden_size": 2047}, "2047 is no multiple of 2, in which int4 packs numbers"),
    ("cpu", "mxfp4", {"intermediate_size": 2880, "ranks": 8}, "360 is no multiple of 32, in which mxfp4 packs numbers"),
    ("cuda9.0", "gguf", {}, "none serves 'gguf'"),
    ("cpu", "gguf", {}, "none serves 'gguf'"),
]


def ask(device: str, dtype: str, layout: str, block: dict[str, Any]) -> ExpertsRequest:
    options = {name: block[name] for name in ("ranks", "partial") if name in block}
    config = MoEConfig(**{**BLOCK, **{name: value for name, value in block.items() if name not in options}})
    return experts_request(config, layout, dtype=dtype, device=DEVICES[device], **options)


def choose(request: ExpertsRequest, word: ResolvedSelection | None = None, **triton: Any) -> Decision:
    """Decide among the project's backends; whether Triton is installed here does not matter."""
    registry = Registry()
    for plugin in (TorchExperts, TorchGrouped, type("Triton", (TritonExperts,), {"requires": (), **triton})):
        registry.register(plugin)
    return decide(registry, "moe_experts", request, word or ResolvedSelection(), field="moe")


def said(decision: Decision) -> dict[str, str]:
    """Return why backends were rejected."""
    rejected = (verdict for verdict in decision.verdicts if not verdict.accepted)
    return {verdict.name: "; ".join(f"{r.code}: {r.detail}" for r in verdict.reasons) for verdict in rejected}


@pytest.mark.parametrize("row", TABLE, ids=range(len(TABLE)))
def test_the_winner_and_all_reasons(row: Row) -> None:
    device, dtype, layout, block, winner, grouped, triton = row
    decision = choose(ask(device, dtype, layout, block))
    assert decision.name == winner
    assert said(decision) == {name: why for name, why in (("torch_grouped", grouped), ("triton", triton)) if why}


@pytest.mark.parametrize(("device", "layout", "block", "reason"), NOBODY, ids=range(len(NOBODY)))
def test_what_nobody_computes(device: str, layout: str, block: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoCandidateError) as caught:
        choose(ask(device, "bfloat16", layout, block))
    assert reason in caught.value.message


def test_the_user_is_obeyed_or_told_why_not() -> None:
    forced = ResolvedSelection(force="torch_grouped", force_from="force")
    assert choose(ask("cuda9.0", "bfloat16", "dense", {}), forced).how == "forced"
    with pytest.raises(NoCandidateError) as caught:
        choose(ask("cuda8.0", "bfloat16", "dense", {}), forced)
    assert caught.value.message == (
        "'torch_grouped' was forced for moe_experts for target, 64 experts (dense), but cannot serve it: "
        "capability: 8.0 is below 9.0"
    )


def test_without_triton() -> None:
    decision = choose(ask("cuda9.0", "bfloat16", "dense", {}), requires=("no-such-distribution>=1",))
    assert decision.name == "torch_grouped"
    (verdict,) = decision.rejected
    assert verdict.reasons[0].code == "missing_package"


def test_reasons_are_data() -> None:
    (reason,) = TorchGrouped.check(ask("cuda8.0", "bfloat16", "dense", {}))
    assert reason == Reason("capability", "device.capability", "8.0 is below 9.0")


def test_gluon_is_chosen_where_it_is_named_and_fits() -> None:
    registry, request = Registry(), ask("cuda9.0", "bfloat16", "dense", {})
    for plugin in (TorchExperts, TritonExperts, GluonExperts):
        registry.register(type(plugin.__name__, (plugin,), {"requires": ()}))
    decision = decide(registry, "moe_experts", request, ResolvedSelection(), field="moe")
    assert decision.name == "triton"
    (verdict,) = (verdict for verdict in decision.verdicts if verdict.name == "gluon")
    assert [reason.code for reason in verdict.reasons] == ["opt_in"]
    named = ResolvedSelection(force="gluon", force_from="force")
    assert decide(registry, "moe_experts", request, named, field="moe").name == "gluon"
    with pytest.raises(NoCandidateError, match=r"8\.9 is not 9\.0"):
        decide(registry, "moe_experts", ask("cuda8.9", "bfloat16", "dense", {}), named, field="moe")
