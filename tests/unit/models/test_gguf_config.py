"""What a decoder is told by the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.errors import CheckpointError
from jackfield_models.llama import gguf_decoder_config

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    **{
        f"llama.{name}": value
        for name, value in (
            ("attention.head_count", 4),
            ("embedding_length", 32),
            ("block_count", 2),
            ("feed_forward_length", 64),
            ("context_length", 128),
            ("attention.layer_norm_rms_epsilon", 1e-5),
        )
    },
}
TENSORS = {"token_embd.weight": (100, 32)}
FACTORS = {"llama.rope.factors": [1.0, 2.0, 4.0, 8.0]}
LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}


def test_rotary_frequencies_are_scaled_in_one_way() -> None:
    assert "rope_scaling" not in gguf_decoder_config(METADATA, TENSORS)
    found = gguf_decoder_config({**METADATA, **FACTORS}, TENSORS)["rope_scaling"]
    assert found == {"rope_type": "factors", "factors": [1.0, 2.0, 4.0, 8.0]}
    found = gguf_decoder_config({**METADATA, **LINEAR}, TENSORS)["rope_scaling"]
    assert found == {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(CheckpointError, match="scales rotary frequencies twice") as caught:
        gguf_decoder_config({**METADATA, **FACTORS, **LINEAR}, TENSORS)
    assert (caught.value.field, caught.value.value) == ("llama.rope.scaling.type", "linear")
