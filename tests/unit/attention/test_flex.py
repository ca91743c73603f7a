"""Masks of flex_attention against what tokens see, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from jackfield.interfaces import AttentionEnv, AttentionRequest, DeviceFacts
from jackfield.testing.attention import QUERIES
from jackfield.testing.attention_cases import CPU, Query, make_step, settings_of
from jackfield.testing.attention_shapes import ENCODER, Shape
from jackfield_attention.flex import FlexBackend
from jackfield_attention.flex_layer import soft_cap
from jackfield_attention.flex_metadata import TILE, FlexMetadata, FlexMetadataBuilder
from jackfield_native.toolchain import unavailable

CUDA = DeviceFacts("cuda", capability=(9, 0))


def built(request: AttentionRequest, block: int, queries: list[Query]) -> FlexMetadata:
    env = AttentionEnv(request, FlexBackend.cache_specs(request)[0], block, CPU, settings_of(FlexBackend))
    ordered = sorted(queries, key=lambda query: query.new != 1)
    return FlexMetadataBuilder(env).build(make_step(ordered, block, np.arange(1, 10_000, dtype=np.int32)))


def seen(metadata: FlexMetadata) -> torch.Tensor:
    """Return what the mask lets through, [T, S]: in the blocks that are looked at, and nowhere else."""
    mask, zero = metadata.mask, torch.zeros((), dtype=torch.int64)
    tokens, keys = mask.seq_lengths
    places = torch.arange(tokens).unsqueeze(1), torch.arange(keys).unsqueeze(0)
    dense = mask.to_dense()[0, 0].bool()
    looked_at = dense.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:tokens, :keys]
    sees: torch.Tensor = mask.mask_mod(zero, zero, *places)
    return sees & looked_at


@settings(max_examples=60, deadline=None)
@given(
    queries=st.lists(QUERIES, min_size=1, max_size=12),
    block=st.sampled_from([1, 7, 16, 64]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    chunked=st.booleans(),
)
def test_tokens_see_what_they_should_and_blocks_hold_all_of_it(
    queries: list[Query], block: int, window: int | None, chunked: bool
) -> None:
    shape = Shape(window=window, chunked=chunked)
    metadata = built(shape.request(), block, queries)
    found, start = seen(metadata), 0
    for query in sorted(queries, key=lambda one: one.new != 1):
        for place in range(query.new):
            position = query.old + place
            wanted = list(range(shape.first_seen(position), position + 1))
            assert metadata.k_S[found[start + place]].tolist() == wanted
            assert int(metadata.q_T[start + place]) == position
        start += query.new


def test_blocks_that_nobody_sees_are_left_out() -> None:
    metadata = built(Shape().request(), 16, [Query(2 * TILE), Query(TILE, 3 * TILE)])
    # Two blocks of one sequence look at its own two; the other sequence's one at its own four.
    assert metadata.mask.kv_num_blocks.flatten().tolist() == [2, 2, 4]
    assert metadata.mask.kv_indices[0, 0, 2, :4].tolist() == [2, 3, 4, 5]


def test_encoder_sequences_see_themselves() -> None:
    request = replace(ENCODER, window=3)
    found = seen(built(request, 16, [Query(1), Query(5)]))
    assert found[0].nonzero().flatten().tolist() == [0]
    assert [row.nonzero().flatten().tolist() for row in found[1:]] == [
        [1, 2, 3],
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5],
        [2, 3, 4, 5],
        [3, 4, 5],
    ]


@pytest.mark.parametrize(
    ("request_", "codes"),
    [
        (Shape().request(), []),
        (replace(Shape().request(), device=CUDA), ["head_size"]),
        (replace(Shape(head_size=64, value_size=8).request(), device=CUDA), ["head_size"]),
        (replace(Shape(head_size=64, value_size=64).request(), device=CUDA), []),
        (replace(Shape(head_size=64, value_size=64, dtype="float64").request(), device=CUDA), ["dtype"]),
        (Shape(dtype="float64").request(), []),
        (Shape(alibi=True, softcap=1.0).request(), ["softcap"]),
        (replace(ENCODER, needs=ENCODER.needs | {"sinks"}), ["sinks"]),
        (Shape(cache_dtype="float4").request(), ["cache_dtype"]),
    ],
)
def test_what_it_cannot_do_is_refused(request_: AttentionRequest, codes: list[str]) -> None:
    assert [reason.code for reason in FlexBackend.check(request_)] == codes


def test_steps_are_built_anew_and_never_recorded() -> None:
    request = Shape().request()
    env = AttentionEnv(request, FlexBackend.cache_specs(request)[0], 4, CPU, settings_of(FlexBackend))
    builder = FlexMetadataBuilder(env)
    with pytest.raises(NotImplementedError, match="graph"):
        builder.capture(1, 1)
    with pytest.raises(NotImplementedError, match="anew"):
        builder.advance(1)


@pytest.mark.skipif(unavailable() is not None, reason="torch's compiler needs a C compiler")
def test_a_soft_cap_is_compiled_for_any_shape() -> None:
    """As on devices, where all of it is compiled."""
    compiled = torch.compile(flex_attention)
    for tokens, keys in ((5, 64), (7, 96), (9, 130)):
        q, k, v = torch.randn(1, 4, tokens, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)
        options = {"score_mod": soft_cap(torch.tensor(2.0)), "scale": 1.0, "enable_gqa": True}
        torch.testing.assert_close(compiled(q, k, v, **options), flex_attention(q, k, v, **options))
