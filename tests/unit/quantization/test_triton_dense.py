from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import cast

import pytest
import torch
import torch.nn.functional as F

from jackfield.interfaces import (
    Band,
    DeviceFacts,
    LayerInfo,
    OutputShard,
    Parallel,
    ParameterHolder,
    QuantizationRequest,
    QuantizedActivation,
)
from jackfield_quantization import triton_dense_plan as plan
from jackfield_quantization.triton_dense import TritonDense
from jackfield_quantization.triton_dense_plan import (
    AROUND,
    MOST_SPLITS,
    SHORT,
    SkinnyShape,
    counters_for,
    filled,
    foldable_ops,
    narrow_shape,
    skinny_shape,
    splits_for,
)
from jackfield_quantization.triton_dense_scheme import SkinnyScheme
from jackfield_quantization.unquantized import Unquantized
from jackfield_quantization.unquantized_scheme import DenseScheme

INFO = LayerInfo("o", 512, (OutputShard("", 1024),), Parallel.REPLICATED, dtype="bfloat16")
EXPERTS = LayerInfo("x", 512, (OutputShard("up", 64),), Parallel.REPLICATED, dtype="bfloat16", num_experts=3)
MODELS = [(6144, 4096), (4096, 4096), (4096, 12288), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
WIDE = [(960, 576), (3072, 576), (4096, 1024), (6144, 1024), (4096, 2048), (6144, 4096), (12288, 2048)]


class Holder:
    """The least a layer can be."""

    info = INFO

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def get_parameter(self, target: str) -> torch.Tensor:
        assert target == "weight"
        return self.weight

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError


def loaded() -> tuple[Holder, SkinnyScheme]:
    layer, scheme = Holder(torch.randn(1024, 512).bfloat16()), cast(SkinnyScheme, TritonDense.scheme(INFO, None))
    scheme.finalize(layer)
    return layer, scheme


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 16, 17])
def test_off_the_device_the_product_is_torchs(rows: int, with_bias: bool) -> None:
    layer, scheme = loaded()
    x, bias = torch.randn(rows, 512).bfloat16(), torch.randn(1024).bfloat16() if with_bias else None
    assert torch.equal(scheme.apply(layer, x, bias), F.linear(x, layer.weight, bias))
    out = torch.full((rows, 1024), torch.nan, dtype=torch.bfloat16)
    assert scheme.apply(layer, x, bias, out) is out
    torch.testing.assert_close(out, F.linear(x, layer.weight, bias))


def test_storage_lookup_and_dequantize_are_those_of_dense_weights() -> None:
    layer, scheme = loaded()
    assert scheme.parameters(INFO) == Unquantized.scheme(INFO, None).parameters(INFO)
    assert torch.equal(scheme.lookup(layer, torch.tensor([3, 0])), layer.weight[[3, 0]])
    assert scheme.dequantize(layer) is layer.weight


def test_every_layer_has_a_scheme_of_its_own_and_experts_a_plain_one() -> None:
    assert TritonDense.scheme(INFO, None) is not TritonDense.scheme(INFO, None)
    assert type(TritonDense.scheme(EXPERTS, None)) is DenseScheme


def test_quantized_activations_are_refused() -> None:
    layer: ParameterHolder
    layer, scheme = loaded()
    activation = QuantizedActivation(torch.zeros(1, 512, dtype=torch.int8), torch.ones(1))
    with pytest.raises(TypeError, match="a dense weight takes plain activations"):
        scheme.apply(layer, activation, None)


def test_declaration() -> None:
    assert TritonDense.name == "triton_dense"
    assert TritonDense.kinds == {""}
    assert TritonDense.device_types == {"cuda"}
    assert TritonDense.features == Unquantized.features
    assert TritonDense.dtypes == {"bfloat16", "float16"}
    assert TritonDense.requires == ("triton>=3.2",)
    preference = TritonDense.preference(QuantizationRequest())
    assert (preference.band, preference.why) == (Band.GOOD, "skinny products for few rows")


def test_old_devices_and_conversion_are_rejected_with_all_reasons() -> None:
    old, new = (DeviceFacts("cuda", capability=version) for version in ((7, 5), (8, 0)))
    found = TritonDense.check(QuantizationRequest(device=old, online="fp8"))
    assert [(reason.code, reason.fact, reason.detail) for reason in found] == [
        ("online", "online", "triton_dense does not convert weights to 'fp8'"),
        ("capability", "device.capability", "7.5 is below 8.0"),
    ]
    assert not TritonDense.check(QuantizationRequest(device=new))


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(0, 4096, 4096), (17, 4096, 4096), (9, 6144, 4096), (9, 6144, 1024), (1, 4096, 4100), (1, 128, 1024)],
    ids=["no rows", "many rows", "a wide weight", "a small wide weight", "unaligned rows of weight", "a small weight"],
)
def test_where_torch_is_as_good(rows: int, outputs: int, inputs: int) -> None:
    assert skinny_shape(rows, outputs, inputs, 132) is None


@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize(("outputs", "inputs"), MODELS)
@pytest.mark.parametrize("cores", [1, 108, 132])
def test_chosen_launches_are_possible(rows: int, outputs: int, inputs: int, cores: int) -> None:
    shape = skinny_shape(rows, outputs, inputs, cores)
    if shape is None:
        assert rows > 8 and outputs > inputs, "only wide weights of many rows are left to torch"
        return
    assert shape.matrix or rows <= 4
    assert shape.slices == 1 or (shape.matrix and shape.block_i // shape.slices >= 16), "what a matrix unit takes"
    assert 1 <= shape.splits <= min(MOST_SPLITS, -(-inputs // shape.block_i))
    assert all(size & (size - 1) == 0 for size in (shape.block_o, shape.block_i, shape.warps))
    assert shape.splits == 1 or -(-outputs // shape.block_o) <= counters_for(outputs, inputs, cores)


@pytest.mark.parametrize(("outputs", "inputs"), WIDE)
def test_norms_and_activations_are_folded_around_wide_weights_up_to_eight_rows(outputs: int, inputs: int) -> None:
    for rows in range(1, 9):
        assert foldable_ops(rows, skinny_shape(rows, outputs, inputs, 132)) == AROUND
    assert skinny_shape(9, outputs, inputs, 132) is None
    assert foldable_ops(9, None) == frozenset()


def test_programs_of_wide_weights_hold_all_of_their_weight_where_they_can() -> None:
    small, middle, long = (skinny_shape(2, *sizes, 132) for sizes in ((960, 576), (6144, 1024), (4096, 2048)))
    assert small == SkinnyShape(16, 512, 1, 8, 1, True, slices=8, registers=128)
    assert middle == SkinnyShape(32, 512, 1, 8, 1, True, slices=8, registers=128)
    assert long is not None and long.stages > 1, "else tiles are asked for one after another"


def test_what_gives_wide_weights_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "WIDE_MOST", SHORT)
    assert skinny_shape(2, 6144, 4096, 132) is None
    assert skinny_shape(2, 6144, 1024, 132) is not None
    monkeypatch.setattr(plan, "WIDE_ROWS", 1)
    assert skinny_shape(2, 6144, 1024, 132) is None
    assert skinny_shape(2, 1024, 2048, 132) is not None and skinny_shape(1, 6144, 1024, 132) is not None
    monkeypatch.setattr(plan, "NARROW_ROWS", 1)
    assert narrow_shape(2, 1024, 2048, 132) is None and narrow_shape(1, 1024, 2048, 132) is not None


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize(("outputs", "inputs"), [*MODELS, *WIDE])
def test_several_rows_of_8_bit_weights_are_launched_where_those_are_short(rows: int, outputs: int, inputs: int) -> None:
    shape = narrow_shape(rows, outputs, inputs, 132)
    assert (shape is not None) == (rows == 1 or (rows <= 8 and outputs * inputs <= SHORT))
    assert shape is None or shape.splits == 1 or -(-outputs // shape.block_o) <= counters_for(outputs, inputs, 132)


def test_splits_fill_the_device_evenly() -> None:
    assert splits_for(blocks=64, tiles=32, cores=132, fill=2) == 4
    assert splits_for(blocks=96, tiles=32, cores=132, fill=1) == 4, "two splits leave a third of the device idle"
    assert splits_for(blocks=2048, tiles=32, cores=132, fill=2) == 1
    assert splits_for(blocks=16, tiles=4, cores=132, fill=2) == 4, "no more than there are tiles"
    assert splits_for(blocks=1, tiles=1000, cores=132, fill=2) == MOST_SPLITS


def test_filled_changes_the_splits_alone() -> None:
    shape = skinny_shape(16, 4096, 4096, 132)
    assert shape is not None
    again = filled(shape, 1 << 20, 4096, 132, 1)
    assert (again.splits, again.block_o, again.warps, again.stages) == (1, shape.block_o, shape.warps, shape.stages)


def test_no_counters_where_nothing_is_split() -> None:
    assert counters_for(151936, 4096, 132) == 0


def test_light_module_stays_light() -> None:
    code = (
        "import sys, jackfield_quantization.triton_dense; "
        "print([name for name in ('torch', 'numpy', 'triton') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
