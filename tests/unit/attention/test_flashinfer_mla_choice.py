"""When FlashInfer may decode over latents, and what is said where it may not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashinfer_package import put

from jackfield.interfaces import AttentionRequest, Band, DeviceFacts, GraphSupport, HostLengths, RankInfo, intersect
from jackfield_attention.flashinfer_mla import FlashInferMlaBackend
from jackfield_attention.triton_mla import TritonMlaBackend

H200 = DeviceFacts("cuda", capability=(9, 0), cores=132)
REQUEST = AttentionRequest(
    kind="mla",
    dtype="bfloat16",
    device=H200,
    num_heads=128,
    num_kv_heads=1,
    head_size=192,
    value_head_size=128,
    scale=192**-0.5,
    extra={"latent_size": 512, "rope_size": 64},
)
MODULE = (
    "batch_mla_attention_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32"
    "_head_dim_ckv_512_head_dim_kpe_64_profiler_False"
)


@pytest.fixture
def compiled(package: Path) -> None:
    """Kernels of both kinds and both types are there."""
    for name in (MODULE, MODULE.replace("bf16", "f16")):
        put(package / "data" / "aot", name)
        put(package / "data" / "aot", f"{name}_sm90")


REJECTED: dict[tuple[str, str], dict[str, Any]] = {
    ("capability", "7.5 is below 8.0"): {"device": DeviceFacts("cuda", capability=(7, 5))},
    ("cache_dtype", "float8_e4m3fn differs from the computation type bfloat16"): {"cache_dtype": "float8_e4m3fn"},
    ("cache_dtype", "int8 differs from the computation type bfloat16"): {"cache_dtype": "int8"},
    ("latent_size", "256 is not 512"): {"extra": {"latent_size": 256, "rope_size": 64}},
    ("rope_size", "32 is not 64"): {"extra": {"latent_size": 512, "rope_size": 32}},
    ("head_size", "100 is not a multiple of 8"): {"head_size": 100},
}


@pytest.mark.parametrize("reason", REJECTED)
def test_limits(compiled: None, reason: tuple[str, str]) -> None:
    found = FlashInferMlaBackend.check(replace(REQUEST, **REJECTED[reason]))
    assert [(r.code, r.detail) for r in found] == [reason]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_taken(compiled: None, dtype: str, capability: tuple[int, int]) -> None:
    request = replace(REQUEST, dtype=dtype, device=replace(H200, capability=capability))
    assert not FlashInferMlaBackend.check(request)
    assert not FlashInferMlaBackend.check(replace(request, cache_dtype=dtype))


def test_without_kernels_and_compiler_it_is_refused_with_a_remedy(package: Path) -> None:
    (reason,) = FlashInferMlaBackend.check(REQUEST)
    assert reason.code == "toolkit" and "nvcc" in reason.detail and "triton_mla" in reason.remedy


def test_a_compiler_is_enough(package: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("")
    assert not FlashInferMlaBackend.check(REQUEST)


def test_kernels_are_found_in_the_cache_and_are_of_one_kind_and_version(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "home" / ".cache" / "flashinfer"
    put(cache / "0.6.17" / "90a" / "cached_ops", f"{MODULE}_sm90")
    put(cache / "0.6.18" / "90a" / "cached_ops", MODULE)
    assert FlashInferMlaBackend.check(REQUEST)
    assert not FlashInferMlaBackend.check(replace(REQUEST, device=replace(H200, capability=(8, 0))))
    put(cache / "0.6.18" / "90a" / "cached_ops", f"{MODULE}_sm90")
    assert not FlashInferMlaBackend.check(REQUEST)
    assert FlashInferMlaBackend.check(replace(REQUEST, dtype="float16"))


def test_many_heads_of_a_rank_are_what_it_is_for() -> None:
    bands = {heads: FlashInferMlaBackend.preference(replace(REQUEST, num_heads=heads)).band for heads in (16, 63, 64)}
    assert bands == {16: Band.SUPPORTED, 63: Band.SUPPORTED, 64: Band.GOOD}
    shared = FlashInferMlaBackend.preference(replace(REQUEST, rank=RankInfo(0, 4)))
    assert shared.band is Band.SUPPORTED and "decode of 32 heads" in shared.why
    older = FlashInferMlaBackend.preference(replace(REQUEST, device=replace(H200, capability=(8, 0))))
    assert older.band is Band.SUPPORTED and older.why.startswith("fa2 ")


def test_it_must_be_named_is_never_recorded_and_shares_a_cache_with_triton() -> None:
    backend = FlashInferMlaBackend
    assert backend.opt_in and backend.graph_support is GraphSupport.NONE and backend.recorded_query(REQUEST) == 0
    assert backend.host_lengths is HostLengths.EXACT
    (layout,) = TritonMlaBackend.cache_specs(REQUEST)
    assert intersect(backend.cache_specs(REQUEST), [layout]) == layout
