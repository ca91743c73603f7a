"""Positions along three axes, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding, apply_rotary_pos_emb

from jackfield.errors import ConfigError
from jackfield.layers.functional import rotary
from jackfield.layers.rotary import Rotary

SIZE, TOKENS, HEADS = 32, 50, 3
SECTIONS = [4, 6, 6]


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 200, (3, TOKENS), generator=generator)
    return positions, torch.randn(TOKENS, HEADS, SIZE, generator=generator)


def ours(scaling: dict[str, Any], positions: torch.Tensor, x_THD: torch.Tensor) -> torch.Tensor:
    table = Rotary(SIZE, 10000.0, scaling, 256, torch.device("cpu"))
    return rotary(x_THD.clone(), table(positions))


def config(kind: Any, scaling: dict[str, Any]) -> Any:
    values = {"hidden_size": SIZE * HEADS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": SIZE}
    return kind(**values, rope_parameters={"rope_theta": 10000.0, **scaling})


def test_runs_of_frequencies_equal_qwen2_vl() -> None:
    scaling = {"rope_type": "default", "mrope_section": SECTIONS}
    positions, x = draw()
    cos, sin = Qwen2VLRotaryEmbedding(config(Qwen2VLTextConfig, scaling))(x, positions.unsqueeze(1))
    wide = x.transpose(0, 1).unsqueeze(0)
    wanted, _ = apply_rotary_pos_emb(wide, wide, cos, sin)
    torch.testing.assert_close(ours(scaling, positions, x), wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_axes_that_take_turns_equal_qwen3_vl() -> None:
    scaling = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    positions, x = draw()
    cos, sin = Qwen3VLTextRotaryEmbedding(config(Qwen3VLTextConfig, scaling))(x, positions.unsqueeze(1))
    wide = x.transpose(0, 1).unsqueeze(0)
    wanted, _ = apply_rotary_pos_emb(wide, wide, cos, sin)
    torch.testing.assert_close(ours(scaling, positions, x), wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("more", [{}, {"mrope_interleaved": True}])
def test_text_is_rotated_as_without_axes(more: dict[str, Any]) -> None:
    positions, x = draw()
    line = positions[:1].expand(3, -1)
    plain = ours({"rope_type": "default"}, positions[0], x)
    torch.testing.assert_close(ours({"rope_type": "mrope", "mrope_section": SECTIONS, **more}, line, x), plain)
    torch.testing.assert_close(ours({"rope_type": "mrope", "mrope_section": SECTIONS, **more}, positions[0], x), plain)


@pytest.mark.parametrize("sections", [[8, 8], [4, 6, 7]])
def test_sections_that_do_not_add_up_are_refused(sections: list[int]) -> None:
    with pytest.raises(ConfigError, match="16 frequencies among three axes") as caught:
        Rotary(SIZE, 10000.0, {"rope_type": "mrope", "mrope_section": sections}, 64, torch.device("cpu"))
    assert caught.value.field == "rope_scaling.mrope_section"
