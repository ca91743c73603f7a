"""flex_attention compiled for the device, against the kit's reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jackfield.testing.attention_cases import STEPS, make_case, reference, run
from jackfield.testing.attention_shapes import ENCODER, Shape
from jackfield.testing.latent_cases import encoder_attention
from jackfield_attention.flex import FlexBackend

pytestmark = pytest.mark.gpu
PLAIN = Shape(head_size=64, value_size=64, block_size=16)
SHAPES = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=9),
    "chunks": replace(PLAIN, window=16, chunked=True),
    "softcap": replace(PLAIN, softcap=2.0),
    "alibi": replace(PLAIN, alibi=True),
    "sinks": replace(PLAIN, sinks=True),
    "larger values": replace(PLAIN, value_size=128),
    "narrow cache": replace(PLAIN, cache_dtype="int8"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_layers_equal_the_reference(name: str, dtype: str) -> None:
    case = make_case(FlexBackend, replace(SHAPES[name], dtype=dtype), STEPS["mixed"], device=torch.device("cuda"))
    bound = 3e-2 if "narrow" in name else {"float32": 2e-3, "bfloat16": 4e-2}[dtype]
    torch.testing.assert_close(run(FlexBackend, case).double(), reference(case), rtol=bound, atol=bound)


def test_encoders_equal_the_reference() -> None:
    request = replace(ENCODER, head_size=16, value_head_size=16)
    found, wanted = encoder_attention(FlexBackend, request, (5, 1, 17, 200), torch.device("cuda"))
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
