"""The two methods: what they store, what they multiply, and what they leave to others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from native_world import Holder, bound, layer_info, rounding_bound, stored, values_of

from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    Band,
    OutputShard,
    Parallel,
    QuantizationRequest,
    QuantizedActivation,
    RankInfo,
    Settings,
)
from jackfield_native.library import TYPES
from jackfield_native.products import integer_rows
from jackfield_quantization.gguf_scheme import GgufScheme
from jackfield_quantization.native_dense import NativeDense
from jackfield_quantization.native_gguf import PACKED, NativeGguf
from jackfield_quantization.native_schemes import (
    MOST_DENSE_ROWS,
    MOST_ROWS,
    DequantizedScheme,
    NativeDenseScheme,
    PackedScheme,
    most_rows,
)
from jackfield_quantization.unquantized_scheme import DenseScheme

QKV = {"q": (12, "Q4_1"), "k": (8, "Q4_1"), "v": (8, "Q6_K")}
ROWS = (0, 1, 2, MOST_DENSE_ROWS, MOST_DENSE_ROWS + 1, MOST_ROWS, MOST_ROWS + 1)


def packed_layer(dtype: str = "float32") -> tuple[Holder, torch.Tensor]:
    """Return a finalized fused layer and its values."""
    info = layer_info(QKV, 512, dtype)
    parts = {name: stored(word, rows, 512, seed) for seed, (name, (rows, word)) in enumerate(QKV.items())}
    layer = Holder(info, {f"weight_{name}": part for name, part in parts.items()})
    return layer, torch.cat([values_of(part, QKV[name][1]) for name, part in parts.items()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_a_fused_packed_layer(dtype: str, rows: int, biased: bool) -> None:
    layer, values = packed_layer(dtype)
    scheme = NativeGguf.scheme(layer.info, None)
    scheme.finalize(layer)
    kind = getattr(torch, dtype)
    x, bias = torch.randn(rows, 512).to(kind), torch.randn(28).to(kind) if biased else None
    want = F.linear(x.double(), values.double(), None if bias is None else bias.double())
    got = scheme.apply(layer, x, bias)
    assert (got.dtype, got.shape) == (kind, (rows, 28))
    assert (
        (got.double() - want).abs() <= bound(x, values) + (0 if bias is None else bias.double().abs() * 2**-8)
    ).all()
    out = torch.empty(rows, 28, dtype=kind)
    assert scheme.apply(layer, x, bias, out) is out
    assert torch.equal(out, got)


@pytest.mark.parametrize(("wanted", "invariant"), [(True, False), (True, True), (False, False)])
def test_integers_where_the_user_wants_them_and_rows_may_depend_on_their_number(wanted: bool, invariant: bool) -> None:
    layer, values = packed_layer()
    layer.info = replace(layer.info, batch_invariant=invariant)
    scheme = NativeGguf.scheme(layer.info, NativeGguf.spec_of({}, Settings({"integers": wanted})))
    scheme.finalize(layer)
    x = torch.randn(1, 512)
    got, want = scheme.apply(layer, x, None), x.double() @ values.double().t()
    exact = bool(((got.double() - want).abs() <= bound(x, values)).all())
    assert exact == (not wanted or invariant or not integer_rows())
    assert ((got.double() - want).abs() <= rounding_bound(x, values)).all()


def test_how_many_rows_are_few() -> None:
    assert [most_rows(inputs) for inputs in (576, 2048, 4096, 8192, 14336)] == [96, 96, 64, 32, 24]


def test_what_is_stored_has_the_files_bytes() -> None:
    layer, values = packed_layer()
    scheme = NativeGguf.scheme(layer.info, None)
    assert list(scheme.parameters(layer.info)) == list(GgufScheme().parameters(layer.info))
    before = {name: part.clone() for name, part in layer.parameters.items()}
    scheme.finalize(layer)
    assert torch.equal(layer.parameters["weight_0"], torch.cat((before["weight_q"], before["weight_k"])))
    assert torch.equal(layer.parameters["weight_1"], before["weight_v"])
    assert list(layer.parameters) == ["weight_0", "weight_1"]
    assert torch.equal(scheme.dequantize(layer), values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lookup_makes_the_rows_asked_for(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = stored("Q8_0", 50, 64)
    layer = Holder(layer_info({"": (50, "Q8_0")}, 64, dtype, role="embedding"), {"weight": weight})
    scheme = NativeGguf.scheme(layer.info, None)
    scheme.finalize(layer)
    made: list[int] = []
    scheme_module = "jackfield_quantization.native_schemes"
    from jackfield_native.products import decode_rows

    def counting(part: torch.Tensor, word: str, inputs: int) -> torch.Tensor:
        made.append(len(part))
        return decode_rows(part, word, inputs)

    monkeypatch.setattr(f"{scheme_module}.decode_rows", counting)
    ids = torch.tensor([49, 0, 0, 7])
    assert torch.equal(scheme.lookup(layer, ids), values_of(weight, "Q8_0")[ids].to(getattr(torch, dtype)))
    assert made == [4]
    assert scheme.lookup(layer, ids[:0]).shape == (0, 64)


def test_sharded_packed_rows_are_cut_between_blocks() -> None:
    info = layer_info({"": (4, "Q4_1")}, 128, parallel=Parallel.ROW, rank=RankInfo(1, 2))
    (spec,) = NativeGguf.scheme(info, None).parameters(info)
    assert (spec.shape, spec.input_block) == ((4, 40), (32, 20))
    whole = stored("Q4_1", 4, 128)
    layer = Holder(info, {"weight": whole[:, 40:].clone()})
    scheme = NativeGguf.scheme(info, None)
    scheme.finalize(layer)
    assert torch.equal(scheme.dequantize(layer), values_of(whole, "Q4_1")[:, 64:])


def test_other_types_are_dequantized_at_load() -> None:
    info = layer_info({"a": (4, "IQ4_NL"), "b": (4, "Q4_1")}, 32)
    scheme = NativeGguf.scheme(info, None)
    assert type(scheme) is DequantizedScheme
    packed = {"weight_a": torch.randint(0, 60, (4, 18), dtype=torch.uint8), "weight_b": stored("Q4_1", 4, 32)}
    layer, plain = Holder(info, packed), Holder(info, packed)
    scheme.finalize(layer)
    GgufScheme().finalize(plain)
    assert torch.equal(layer.parameters["weight"], plain.parameters["weight"])
    x = torch.randn(2, 32)
    torch.testing.assert_close(scheme.apply(layer, x, None), F.linear(x, plain.parameters["weight"]))


def test_which_scheme_a_layer_gets() -> None:
    packed, experts = layer_info({"": (4, "Q8_0")}, 32), layer_info({"": (4, "Q8_0")}, 32, num_experts=2)
    assert type(NativeGguf.scheme(packed, None)) is PackedScheme
    assert type(NativeGguf.scheme(experts, None)) is GgufScheme
    assert type(NativeDense.scheme(packed, None)) is NativeDenseScheme
    assert type(NativeDense.scheme(experts, None)) is DenseScheme
    assert NativeDense.scheme(packed, None) is not NativeDense.scheme(packed, None)
    assert TYPES.keys() > PACKED
    missing = layer_info({"": (4, "Q8_0")}, 32, tensors={})
    with pytest.raises(CheckpointError, match=r"the checkpoint has no weight for layer layers\.0\.part"):
        NativeGguf.scheme(missing, None).parameters(missing)


@pytest.mark.parametrize(
    ("stored_as", "dtype", "kept"),
    [
        ("bfloat16", "float32", "bfloat16"),
        ("float16", "float32", "float16"),
        ("float32", "float32", "float32"),
        ("float16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
        ("float64", "float32", "float32"),
    ],
)
@pytest.mark.parametrize("rows", ROWS)
def test_dense_weights(stored_as: str, dtype: str, kept: str, rows: int) -> None:
    info = layer_info({"": (9, stored_as)}, 40, dtype)
    scheme = NativeDense.scheme(info, None)
    (spec,) = scheme.parameters(info)
    assert (spec.name, spec.shape, spec.dtype) == ("weight", (9, 40), kept)
    kind = getattr(torch, dtype)
    weight, x, bias = (
        torch.randn(9, 40).to(getattr(torch, kept)),
        torch.randn(rows, 40).to(kind),
        torch.randn(9).to(kind),
    )
    layer = Holder(info, {"weight": weight})
    scheme.finalize(layer)
    want = F.linear(x.double(), weight.double(), bias.double())
    got = scheme.apply(layer, x, bias)
    assert got.dtype == kind
    assert ((got.double() - want).abs() <= bound(x, weight) + bias.double().abs() * 2**-8).all()
    assert torch.equal(scheme.lookup(layer, torch.tensor([8, 0])), weight[[8, 0]].to(kind))
    assert torch.equal(scheme.dequantize(layer), weight.to(kind))


def test_shards_of_unlike_types_are_kept_in_the_computation_type() -> None:
    info = layer_info({"gate": (4, "bfloat16"), "up": (4, "float16")}, 8)
    assert NativeDense.scheme(info, None).parameters(info)[0].dtype == "float32"


def test_unusual_layouts_of_activations_and_results() -> None:
    layer = Holder(layer_info({"": (6, "float32")}, 20), {"weight": torch.randn(6, 20)})
    scheme, weight = NativeDense.scheme(layer.info, None), layer.parameters["weight"]
    for x in (torch.randn(2, 3, 20), torch.randn(20, 5).t(), torch.randn(4, 50)[:, 10:30], torch.randn(20)):
        torch.testing.assert_close(scheme.apply(layer, x, None), F.linear(x, weight))
    out = torch.empty(6, 3).t()
    x = torch.randn(3, 20)
    assert scheme.apply(layer, x, None, out) is out
    torch.testing.assert_close(out, F.linear(x, weight))


def test_quantized_activations_are_refused() -> None:
    layer = Holder(layer_info({"": (6, "float32")}, 20), {"weight": torch.randn(6, 20)})
    activation = QuantizedActivation(torch.zeros(1, 20, dtype=torch.int8), torch.ones(1))
    with pytest.raises(TypeError, match="native products take plain activations"):
        NativeDense.scheme(layer.info, None).apply(layer, activation, None)


def test_declarations() -> None:
    for method in (NativeDense, NativeGguf):
        assert method.features == {"linear", "embedding", "head", "experts", "batch_invariant"}
        assert method.dtypes == {"float32", "bfloat16"}
        assert method.device_types == {"cpu"}
        assert not method.check(QuantizationRequest())
        (reason,) = method.check(QuantizationRequest(online="fp8"))
        assert (reason.code, reason.detail) == ("online", f"{method.name} does not convert weights to 'fp8'")
    assert NativeDense.kinds == {""}
    assert NativeGguf.kinds == {"gguf"}
    (reason,) = NativeGguf.check(QuantizationRequest(kind="gguf", storage_dtypes=frozenset({"ggml:Q8_1"})))
    assert (reason.code, reason.detail) == ("storage_dtype", "Q8_1 cannot be dequantized")
    dense, packed = (method.preference(QuantizationRequest()) for method in (NativeDense, NativeGguf))
    assert (dense.band, dense.why) == (Band.GOOD, "products of few rows read the weight once")
    assert (packed.band, packed.why) == (Band.GOOD, "weights stay packed and are read once for few rows")


def test_a_shard_may_be_cut_among_ranks() -> None:
    info = layer_info({"": (8, "Q8_0")}, 32, parallel=Parallel.COLUMN, rank=RankInfo(0, 2))
    assert info.shards == (OutputShard("", 8),)
    assert NativeGguf.scheme(info, None).parameters(info)[0].shape == (4, 34)
