"""When FlashInfer is taken, and what is said where it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flashinfer_package import put

from jackfield.interfaces import AttentionRequest, Band, DeviceFacts
from jackfield_attention.flashinfer import FlashInferBackend, kernels_for

H200 = DeviceFacts("cuda", capability=(9, 0), cores=132)
REQUEST = AttentionRequest(
    kind="full", dtype="bfloat16", device=H200, num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5
)
HEADS = "dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128"
MODULE = f"batch_prefill_with_kv_cache_{HEADS}_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"


def test_without_kernels_and_compiler_it_is_refused_with_a_remedy(package: Path) -> None:
    (reason,) = FlashInferBackend.check(REQUEST)
    assert reason.code == "toolkit" and "nvcc" in reason.detail and "triton" in reason.remedy


def test_a_compiler_is_enough_but_nobody_waits_for_it_unasked(package: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("")
    assert not FlashInferBackend.check(REQUEST)
    found = FlashInferBackend.preference(REQUEST)
    assert found.band is Band.SUPPORTED and "would be compiled first" in found.why


@pytest.mark.parametrize("where", ["package", "cache"])
def test_compiled_kernels_are_taken(package: Path, tmp_path: Path, where: str) -> None:
    folder = package / "data" / "aot"
    if where == "cache":
        folder = tmp_path / "home" / ".cache" / "flashinfer" / "0.6.18" / "90a" / "cached_ops"
    put(folder, f"{MODULE}_sm90")
    assert not FlashInferBackend.check(REQUEST)
    found = FlashInferBackend.preference(REQUEST)
    assert found.band is Band.BEST and found.why.startswith("fa3 ")
    assert FlashInferBackend.check(replace(REQUEST, kind="sliding", window=64)), "a module for windows is another one"
    assert FlashInferBackend.check(replace(REQUEST, dtype="float16"))


def test_kernels_of_another_version_are_none(package: Path, tmp_path: Path) -> None:
    put(tmp_path / "home" / ".cache" / "flashinfer" / "0.6.17" / "90a" / "cached_ops", f"{MODULE}_sm90")
    assert [reason.code for reason in FlashInferBackend.check(REQUEST)] == ["toolkit"]


def test_fa2_modules_are_not_those_of_fa3(package: Path) -> None:
    put(package / "data" / "aot", MODULE)
    assert FlashInferBackend.check(REQUEST)
    older = replace(REQUEST, device=replace(H200, capability=(8, 0)))
    assert not FlashInferBackend.check(older)
    assert FlashInferBackend.preference(older).band is Band.SUPPORTED


def test_which_kernels_run_is_said() -> None:
    assert kernels_for(REQUEST, "") == "fa3" and kernels_for(REQUEST, "fa2") == "fa2"
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert kernels_for(replace(REQUEST, device=replace(H200, capability=capability)), "") == "fa2"


def test_heads_without_a_kernel_are_refused(package: Path) -> None:
    codes = [reason.code for reason in FlashInferBackend.check(replace(REQUEST, head_size=80))]
    assert codes == ["head_size", "toolkit"]
