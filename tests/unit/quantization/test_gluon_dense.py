from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from jackfield.interfaces import DeviceFacts, LayerInfo, OutputShard, Parallel, QuantizationRequest
from jackfield_quantization.gluon_dense import GluonDense
from jackfield_quantization.gluon_dense_scheme import GatedScheme
from jackfield_quantization.triton_dense_scheme import SkinnyScheme
from jackfield_quantization.unquantized_scheme import DenseScheme
from jackfield_triton.rows_product import BLOCK, tiles

INFO = LayerInfo("up", 1024, (OutputShard("", 6144),), Parallel.REPLICATED, dtype="bfloat16")
CORES = 132


def on_a_device() -> GatedScheme:
    """Return a scheme as it is once its weight is on a device that has the kernels."""
    scheme = cast(GatedScheme, GluonDense.scheme(INFO, None))
    scheme._wide, scheme._cores, scheme._counters = True, CORES, torch.zeros(1)
    return scheme


def test_tiles_are_counted_along_gates_or_all_outputs() -> None:
    assert tiles(1, 6144, gated=True) == tiles(BLOCK, 6144, gated=False) == 24
    assert tiles(BLOCK + 1, 6144, gated=True) == 48
    assert tiles(1, 272, gated=True) == tiles(1, 272, gated=False) == 2


@pytest.mark.parametrize(("rows", "folded"), [(17, False), (21 * BLOCK, False), (22 * BLOCK, True), (8192, True)])
def test_activations_are_folded_where_there_are_tiles_enough(rows: int, folded: bool) -> None:
    found = on_a_device().folded_ops(INFO, rows)
    assert found == (frozenset({"silu_and_mul", "gelu_tanh_and_mul"}) if folded else frozenset())


@pytest.mark.parametrize(
    "info",
    [
        replace(INFO, bias=True),
        replace(INFO, dtype="float32"),
        replace(INFO, input_size=1028),
        replace(INFO, shards=(OutputShard("", 6152),)),
    ],
    ids=["bias", "type", "inputs", "outputs"],
)
def test_what_the_kernel_does_not_have_is_not_folded(info: LayerInfo) -> None:
    assert on_a_device().folded_ops(info, 8192) == frozenset()


def test_few_rows_are_folded_as_before() -> None:
    scheme, before = on_a_device(), SkinnyScheme()
    before._cores, before._counters = CORES, torch.zeros(1)
    assert scheme.folded_ops(INFO, 1) == before.folded_ops(INFO, 1) != frozenset()


def test_off_the_device_nothing_is_folded() -> None:
    assert GluonDense.scheme(INFO, None).folded_ops(INFO, 8192) == frozenset()


def test_experts_are_left_to_their_backend() -> None:
    assert type(GluonDense.scheme(replace(INFO, num_experts=3, role="experts"), None)) is DenseScheme


@pytest.mark.parametrize(("capability", "reasons"), [((9, 0), []), ((8, 9), ["capability"]), ((10, 0), ["capability"])])
def test_other_devices_are_rejected(capability: tuple[int, int], reasons: list[str]) -> None:
    request = QuantizationRequest(device=DeviceFacts("cuda", capability=capability))
    assert [reason.code for reason in GluonDense.check(request)] == reasons
    assert GluonDense.opt_in
