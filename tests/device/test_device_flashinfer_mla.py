"""Decode over latents by FlashInfer on the device, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from jackfield.interfaces import AttentionRequest, DeviceFacts
from jackfield.testing.attention_cases import Query
from jackfield.testing.latent_cases import latent_attention
from jackfield_attention.flashinfer_mla import FlashInferMlaBackend, is_compiled

pytestmark = pytest.mark.gpu
STEPS = {
    "decodes": [Query(1, 20), Query(1, 900), Query(1, 70)],
    "mixed": [Query(1, 411), Query(1, 0), Query(50, 120), Query(2, 30)],
    "prompts": [Query(50, 120), Query(2, 30)],
    "many decodes": [Query(1, 7 * index % 300) for index in range(140)] + [Query(1, 63), Query(1, 64), Query(1, 255)],
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize("block", [4, 64])
def test_latents_equal_the_definition(block: int, heads: int, step: str, dtype: str) -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed here")
    device = torch.cuda.get_device_properties(0)
    request = AttentionRequest(
        kind="mla",
        dtype=dtype,
        device=DeviceFacts("cuda", capability=(device.major, device.minor), cores=device.multi_processor_count),
        num_heads=heads,
        num_kv_heads=1,
        head_size=192,
        value_head_size=128,
        scale=192**-0.5,
        extra={"latent_size": 512, "rope_size": 64},
    )
    if not is_compiled(request):
        pytest.skip("FlashInfer's kernels are not compiled here, which takes minutes")
    found, wanted = latent_attention(FlashInferMlaBackend, request, STEPS[step], torch.device("cuda"), block=block)
    assert float((found.cpu() - wanted.cpu()).norm() / wanted.cpu().norm()) < 1e-2
