"""``fla``: what it hands to the package's kernels, which stand-ins on the CPU take as the package says, against the
references and the definitions; and what it refuses.

Stand-ins compute token by token: from the papers' equations (arXiv:2412.06464, equation 10; arXiv:2510.26692, equation
1; arXiv:2401.04658), and, where the package is installed, by its own plain references.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from jackfield.config.selection import Selection
from jackfield.errors import NoCandidateError
from jackfield.interfaces import AttentionBackend, AttentionRequest, DeviceFacts
from jackfield.oracle import decide
from jackfield.oracle.judge import set_reasons
from jackfield.registry import Registry
from jackfield.testing.attention_cases import CPU
from jackfield.testing.attention_shapes import STATE_SHAPES, state_request
from jackfield.testing.state_cases import definition, make_inputs, run_states
from jackfield_attention import fla_states_layer
from jackfield_attention.fla_states import FlaStatesBackend
from jackfield_attention.fla_states_layer import FlaKernels
from jackfield_attention.torch_linear import TorchDeltaBackend, TorchLinearBackend

KINDS = ("gdn", "kda", "linear")
REFERENCES: dict[str, type[AttentionBackend]] = {
    "gdn": TorchDeltaBackend,
    "kda": TorchDeltaBackend,
    "linear": TorchLinearBackend,
}
NAIVE = {
    "gdn": ("gated_delta_rule", "naive_chunk_gated_delta_rule", "naive_recurrent_gated_delta_rule"),
    "kda": ("kda", "naive_recurrent_kda", "naive_recurrent_kda"),
    "linear": ("simple_gla", "naive_chunk_simple_gla", "naive_recurrent_simple_gla"),
}
"""Module and functions of the package, for chunks and for single tokens. ``naive_chunk_kda`` takes full chunks only."""
NO_PACKAGE = "flash-linear-attention is not installed"
EPS = 1e-6
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def equations(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    scale: float,
    initial_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [1, L, H, V] and the state [1, H, K, V] of ``S = (I - beta k k') diag(exp(g)) S + beta k v'``,
    ``o = S' (scale q)``; without ``beta`` of ``S = exp(g) S + k v'``. Key heads were repeated.
    """
    state, identity, rows = initial_state[0], torch.eye(q.shape[-1]), []
    for at in range(q.shape[1]):
        q_HK1, k_HK1, v_H1V = q[0, at, :, :, None], k[0, at, :, :, None], v[0, at, :, None]
        kept = (g if g.dim() == 4 else g.unsqueeze(-1))[0, at].exp().unsqueeze(-1) * state
        if beta is None:
            state = kept + k_HK1 @ v_H1V
        else:
            strength = beta[0, at, :, None, None]
            state = (identity - strength * k_HK1 @ k_HK1.mT) @ kept + strength * k_HK1 @ v_H1V
        rows.append((scale * q_HK1.mT @ state).squeeze(1))
    return torch.stack(rows).unsqueeze(0), state.unsqueeze(0)


def sequences(
    tensors: dict[str, torch.Tensor], cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each sequence, with a batch of 1; only a batch of 1 may hold several."""
    if cu_seqlens is None:
        for index in range(len(tensors["q"])):
            yield {name: value[index : index + 1] for name, value in tensors.items()}
        return
    assert cu_seqlens_cpu is not None and torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.int64
    assert {len(value) for value in tensors.values()} == {1}
    assert {value.shape[1] for value in tensors.values()} == {int(cu_seqlens[-1])}
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        yield {name: value[:, start:stop] for name, value in tensors.items()}


def stand_in(
    rule: Rule,
    shares_keys: bool,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    **tensors: torch.Tensor,
) -> tuple[torch.Tensor, Any]:
    """Do what a kernel of the package says that it does, sequence by sequence. ``shares_keys``: whether it takes fewer
    key heads than value heads; those of simple_gla do not.
    """
    heads = tensors["v"].shape[2]
    assert initial_state.dtype == torch.float32
    assert initial_state.shape[1:] == (heads, tensors["k"].shape[-1], tensors["v"].shape[-1])
    for name in ("q", "k"):
        x = tensors[name]
        if use_qk_l2norm_in_kernel:
            x = x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()
        assert shares_keys or x.shape[2] == heads
        tensors[name] = x.repeat_interleave(heads // x.shape[2], 2)
    given = {"scale": tensors["q"].shape[-1] ** -0.5 if scale is None else scale}
    parts = list(sequences(tensors, cu_seqlens, cu_seqlens_cpu))
    assert len(parts) == len(initial_state)
    found = [rule(**part, **given, initial_state=initial_state[index : index + 1]) for index, part in enumerate(parts)]
    outputs = torch.cat([o for o, _ in found], 0 if cu_seqlens is None else 1)
    return outputs, torch.cat([state for _, state in found]) if output_final_state else None


@pytest.fixture(params=["equations", "package"])
def stood_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins in the kernels' place."""
    packaged = request.param == "package"
    if packaged:
        pytest.importorskip("fla.ops", reason=NO_PACKAGE)

    def kernels_of(kind: str) -> FlaKernels:
        rules: list[Rule] = [equations, equations]
        if packaged:
            module = import_module(f"fla.ops.{NAIVE[kind][0]}.naive")
            rules = [partial(getattr(module, name), output_final_state=True) for name in NAIVE[kind][1:]]
        chunk, step = (partial(stand_in, rule, kind != "linear") for rule in rules)
        return FlaKernels(chunk, step)

    monkeypatch.setattr(fla_states_layer, "kernels_of", kernels_of)


def cuts_of(lengths: list[int], seed: int) -> list[list[int]]:
    """Return where pieces of each sequence end: some whole, some in chunks, some with single tokens at the end."""
    draw = random.Random(seed)
    cuts = []
    for length in lengths:
        chunks = sorted(draw.sample(range(1, length), min(length - 1, draw.randrange(4))))
        singles = list(range(max(1, length - draw.randrange(5)), length))
        cuts.append(sorted({*chunks, *singles}))
    return cuts


@pytest.mark.usefixtures("stood_in")
@pytest.mark.parametrize("in_place", [False, True], ids=["other pages", "in place"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_reference_and_definition(kind: str, seed: int, in_place: bool) -> None:
    lengths = [1, 7, 66, 90]
    inputs, cuts = make_inputs(kind, lengths, seed), cuts_of(lengths, seed)
    found = run_states(FlaStatesBackend, kind, inputs, cuts, CPU, in_place=in_place)
    wanted = run_states(REFERENCES[kind], kind, inputs, cuts, CPU, in_place=in_place)
    for mine, theirs, tokens in zip(found, wanted, inputs.sequences, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine, definition(kind, tokens, inputs.constants), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("stood_in")
def test_key_heads_are_shared_by_neighbours_in_linear_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATE_SHAPES, "linear", replace(STATE_SHAPES["linear"], groups=2))
    inputs = make_inputs("linear", [9], 0)
    (found,) = run_states(FlaStatesBackend, "linear", inputs, [[5, 8]], CPU)
    wanted = definition("linear", inputs.sequences[0], inputs.constants)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_has_the_kernels_and_their_arguments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla.ops", reason=NO_PACKAGE)
    kernels = fla_states_layer.kernels_of(kind)
    names: dict[str, set[str]] = {}

    def noted(which: str, **given: Any) -> tuple[torch.Tensor, Any]:
        names[which] = set(given)
        return stand_in(equations, True, **given)

    noting = FlaKernels(partial(noted, "chunk"), partial(noted, "step"))
    monkeypatch.setattr(fla_states_layer, "kernels_of", lambda kind: noting)
    run_states(FlaStatesBackend, kind, make_inputs(kind, [4], 0), [[3]], CPU)
    for which, kernel in (("chunk", kernels.chunk), ("step", kernels.step)):
        assert names[which] <= set(inspect.signature(kernel).parameters)


H200 = DeviceFacts("cuda", capability=(9, 0), cores=132)


def request_of(kind: str, **changes: Any) -> AttentionRequest:
    return replace(state_request(kind), **{"dtype": "bfloat16", "device": H200, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_the_references_layout_are_taken(kind: str) -> None:
    request = request_of(kind)
    assert not set_reasons(FlaStatesBackend, request) and not FlaStatesBackend.check(request)
    assert FlaStatesBackend.cache_specs(request) == REFERENCES[kind].cache_specs(request)


@pytest.mark.parametrize(
    ("kind", "changes", "reasons"),
    [
        ("gdn", {"head_size": 512}, [("head_size", "512 is above 256")]),
        ("kda", {"head_size": 257}, [("head_size", "257 is above 256")]),
        ("linear", {"head_size": 512}, []),
        ("gdn", {"device": DeviceFacts("cuda", capability=(7, 5))}, [("capability", "7.5 is below 8.0")]),
    ],
)
def test_limits(kind: str, changes: dict[str, Any], reasons: list[tuple[str, str]]) -> None:
    assert [(r.code, r.detail) for r in FlaStatesBackend.check(request_of(kind, **changes))] == reasons


def test_states_are_not_stored_in_narrow_types() -> None:
    found = FlaStatesBackend.check(request_of("gdn", cache_dtype="float8_e4m3fn"))
    assert [r.code for r in found] == ["cache_dtype"]


@pytest.mark.parametrize(
    ("kind", "changes", "code"),
    [
        ("gdn", {"device": DeviceFacts("cpu")}, "device"),
        ("gdn", {"dtype": "float32"}, "dtype"),
        ("linear", {"dtype": "float16"}, "dtype"),
        ("mamba2", {}, "kind"),
    ],
)
def test_other_sets_are_refused(kind: str, changes: dict[str, Any], code: str) -> None:
    found = set_reasons(FlaStatesBackend, request_of(kind, **changes))
    assert [reason.code for reason in found] == [code]


@pytest.mark.parametrize("present", [False, True], ids=["without the package", "with the package"])
def test_it_is_explained_and_must_be_named(present: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"triton": "3.6.0"} | ({"fla-core": "0.6.0"} if present else {})
    monkeypatch.setattr("jackfield.registry.requirements.installed_version", versions.get)
    registry, request = Registry(), request_of("gdn")
    registry.register(FlaStatesBackend)

    def choose(selection: Selection) -> Any:
        word = selection.resolve(kind="gdn")
        return decide(registry, "attention_backends", request, word, field="attention")

    with pytest.raises(NoCandidateError) as unnamed:
        choose(Selection())
    assert "set attention.force to 'fla'" in str(unnamed.value)
    assert ("pip install 'fla-core>=0.6'" in str(unnamed.value)) is not present
    if present:
        assert choose(Selection(force="fla")).name == "fla"
