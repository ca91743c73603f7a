"""Tiles of four-bit numbers as the device's own kernel packs and multiplies them."""

from __future__ import annotations

import pytest
import torch

from jackfield_quantization.torchao_storage import MIDDLE, untiled

pytestmark = pytest.mark.gpu
OUTPUTS, INPUTS, GROUP = 64, 1024, 32


def numbers_of() -> torch.Tensor:
    return torch.randint(0, 16, (OUTPUTS, INPUTS), generator=torch.Generator().manual_seed(0))


def packed(inner: int) -> torch.Tensor:
    numbers = numbers_of()
    pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8).cuda()
    found: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs, inner)
    return found


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_tiles_of_the_kernel_are_put_back(inner: int) -> None:
    assert torch.equal(untiled(packed(inner)).cpu(), numbers_of().int())


def test_a_product_with_the_identity_is_what_tiles_mean() -> None:
    """Scales are powers of two and zeros whole numbers, so that bfloat16 holds every product."""
    scale = torch.exp2(torch.randint(-2, 3, (INPUTS // GROUP, OUTPUTS), generator=torch.Generator().manual_seed(1)))
    zero = torch.randint(-4, 5, (INPUTS // GROUP, OUTPUTS), generator=torch.Generator().manual_seed(2)).float()
    pairs = torch.stack((scale, zero), -1).bfloat16().cuda()
    one = torch.eye(INPUTS, dtype=torch.bfloat16, device="cuda")
    product = torch.ops.aten._weight_int4pack_mm(one, packed(8), GROUP, pairs).t().float().cpu()
    wide = [part.t().repeat_interleave(GROUP, 1) for part in (scale, zero)]
    assert torch.equal(product, (numbers_of() - MIDDLE) * wide[0] + wide[1])
