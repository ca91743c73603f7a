"""Latent attention to chosen tokens in Triton against its definition, and against the torch reference where types are
narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.interfaces import AttentionEnv, AttentionRequest, DeviceFacts, StepLimits
from jackfield.testing.attention_cases import Query, settings_of
from jackfield.testing.latent_cases import latent_attention
from jackfield_attention.torch_mla_layer import MlaLayer
from jackfield_attention.torch_mla_sparse import TorchMlaSparseBackend
from jackfield_attention.torch_mla_sparse_layer import SparseMlaLayer
from jackfield_attention.triton_mla_sparse import TritonMlaSparseBackend
from jackfield_attention.triton_mla_sparse_layer import TritonMlaSparseLayer
from jackfield_attention.triton_mla_sparse_metadata import TritonSparseMetadataBuilder

DEVICE = torch.device("cpu")
INDEX = {"index_heads": 20, "index_size": 16, "index_topk": 9}
REQUEST = AttentionRequest(
    kind="mla_sparse",
    dtype="float32",
    device=DeviceFacts("cuda", capability=(9, 0), cores=4),
    num_heads=4,
    num_kv_heads=1,
    head_size=32,
    value_head_size=24,
    scale=32**-0.5,
    extra={"latent_size": 32, "rope_size": 8, **INDEX},
)
STEPS: dict[str, list[Query]] = {
    "one token": [Query(1, 0)],
    "decodes": [Query(1, 20), Query(1, 3), Query(1, 50), Query(1, 33)],
    "prompts": [Query(9, 0), Query(20, 17), Query(8, 0)],
    "mixed": [Query(1, 41), Query(1, 0), Query(5, 12), Query(2, 3)],
}
SIZES = {
    "as given": REQUEST,
    "many heads": replace(REQUEST, num_heads=20),
    "odd sizes": replace(
        REQUEST,
        head_size=30,
        value_head_size=18,
        extra={"latent_size": 40, "rope_size": 6, "index_heads": 24, "index_size": 10, "index_topk": 17},
    ),
    "half": replace(REQUEST, dtype="float16"),
}
TOLERANCE = {"float32": 2e-5, "float16": 3e-3}


def with_options(backend: Any = TritonMlaSparseBackend, **options: int) -> Any:
    """Return the backend with other defaults of its options."""
    changed = {
        name: replace(option, default=options.get(name, option.default)) for name, option in backend.options.items()
    }
    return type("Changed", (backend,), {"options": changed})


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def check(backend: Any, request: AttentionRequest, queries: Sequence[Query]) -> None:
    assert error(*latent_attention(backend, request, queries, DEVICE)) < TOLERANCE[request.dtype]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("size", SIZES)
def test_it_equals_the_definition(size: str, step: str) -> None:
    check(TritonMlaSparseBackend, SIZES[size], STEPS[step])


@pytest.mark.parametrize("splits", [1, 3, 7])
@pytest.mark.parametrize("numbers", [60, 4096])
def test_parts_come_together(splits: int, numbers: int) -> None:
    many = replace(REQUEST, extra={**REQUEST.extra, "index_topk": 40})
    backend = with_options(decode_splits=splits, decode_tile=16, part_numbers=numbers, score_tile=16)
    check(backend, many, [Query(1, 60), Query(1, 2), Query(4, 40)])


def test_choices_are_those_of_the_reference() -> None:
    few = replace(REQUEST, extra={**REQUEST.extra, "index_topk": 3})
    found, wanted = (
        latent_attention(one, few, STEPS["mixed"], DEVICE)[0] for one in (TritonMlaSparseBackend, TorchMlaSparseBackend)
    )
    other = replace(REQUEST, extra={**REQUEST.extra, "index_topk": 4})
    assert error(found, wanted) < 2e-5
    assert error(latent_attention(TorchMlaSparseBackend, other, STEPS["mixed"], DEVICE)[0], wanted) > 0.1


class WrittenByTorch(TritonMlaSparseLayer):
    """Stores as torch does: the interpreter cuts numbers off where devices round them."""

    write = MlaLayer.write
    write_index = SparseMlaLayer.write_index


@pytest.mark.parametrize("step", ["decodes", "mixed"])
def test_narrow_caches_are_read_as_the_reference_reads_them(step: str) -> None:
    layer = classmethod(lambda cls, env, index: WrittenByTorch(env))
    backend = type("Narrow", (TritonMlaSparseBackend,), {"layer": layer})
    narrow = replace(REQUEST, cache_dtype="float8_e4m3fn")
    found, wanted = (latent_attention(one, narrow, STEPS[step], DEVICE)[0] for one in (backend, TorchMlaSparseBackend))
    assert error(found, wanted) < 2e-5


def built(limit: int) -> TritonSparseMetadataBuilder:
    spec = TritonMlaSparseBackend.cache_specs(REQUEST)[0]
    builder = TritonSparseMetadataBuilder(AttentionEnv(REQUEST, spec, 4, DEVICE, settings_of(TritonMlaSparseBackend)))
    builder.allocate(StepLimits(4, 4, 8, limit))
    return builder


def test_a_recorded_step_has_room_for_the_longest_sequence() -> None:
    recorded = built(32).capture(3, 1)
    (rows,) = recorded.rows
    assert recorded.whole.num_decodes == 0 and rows.seen.tolist() == [0, 0, 0]
    assert rows.width == 32 and rows.table.shape == (3, 8)
    with pytest.raises(NotImplementedError, match="single tokens"):
        built(32).capture(3, 2)


class Recording(TritonSparseMetadataBuilder):
    """Builds as it does once steps were recorded."""

    def allocate(self, limits: StepLimits) -> None:
        super().allocate(limits)
        self.capture(limits.max_sequences, 1)


@pytest.mark.parametrize("step", ["decodes", "mixed"])
def test_steps_behind_a_recording_are_computed_alike(step: str) -> None:
    builder = classmethod(lambda cls, env: Recording(env))
    check(type("Recorded", (TritonMlaSparseBackend,), {"metadata_builder": builder}), REQUEST, STEPS[step])


def test_where_nothing_can_be_left_out_all_is_attended_to() -> None:
    recorded = built(9).capture(3, 1)
    assert recorded.whole.num_decodes == 3 and not recorded.rows


def test_old_devices_and_unknown_types_are_refused() -> None:
    old = replace(REQUEST, device=DeviceFacts("cuda", capability=(7, 5)), cache_dtype="int8")
    assert [reason.code for reason in TritonMlaSparseBackend.check(old)] == ["capability", "cache_dtype"]
