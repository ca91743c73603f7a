"""Decode, prefill and mixed steps against brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_case import TOLERANCE, Shape, attend, attended, error, expected, limits_of, make_case

from jackfield.interfaces import AttentionBackend, StepLimits
from jackfield.layers.composite import Composite
from jackfield.testing.attention_cases import STEPS, reference, run
from jackfield.testing.attention_cases import make_case as make_kit_case
from jackfield.testing.attention_shapes import Shape as KitShape
from jackfield_attention.flash_attn import FlashAttnBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_attention.triton_backend import TritonBackend
from jackfield_attention.triton_metadata import TritonMetadataBuilder

TRITON = TritonBackend

DECODES = {
    "one token": Shape([1], [1]),
    "lengths at tile edges": Shape([1, 1, 1, 1], [63, 64, 65, 128]),
    "one head": Shape([1, 1], [20, 70], heads=1, kv_heads=1),
    "a group of three": Shape([1, 1], [20, 70], heads=6, kv_heads=2),
    "a group of sixteen": Shape([1], [40], heads=16, kv_heads=1),
    "head size 80": Shape([1, 1], [33, 70], size=80),
    "blocks of five": Shape([1, 1], [33, 70], block=5),
    "blocks of a tile": Shape([1, 1], [33, 170], block=64),
    "blocks of two tiles": Shape([1, 1], [33, 170], block=128),
    "tokens outside heads": Shape([1, 1], [33, 70], layout=1),
    "window": Shape([1, 1, 1], [20, 65, 200], window=24),
    "window over splits": Shape([1, 1], [300, 70], window=150, settings={"decode_splits": 3, "decode_tile": 16}),
    "chunks": Shape([1, 1, 1, 1], [20, 64, 65, 200], window=32, chunked=True),
    "chunks over splits": Shape(
        [1, 1], [299, 70], window=150, chunked=True, settings={"decode_splits": 3, "decode_tile": 16}
    ),
    "softcap": Shape([1, 1], [20, 70], softcap=2.0),
    "sinks": Shape([1, 1], [20, 170], sinks=True),
    "splits of which most are empty": Shape([1, 1, 1], [5, 90, 300], settings={"decode_splits": 7, "decode_tile": 16}),
    "sinks over splits": Shape([1, 1], [90, 300], sinks=True, settings={"decode_splits": 5, "decode_tile": 16}),
    "half": Shape([1, 1, 1], [5, 90, 200], dtype="float16", settings={"decode_splits": 2, "decode_tile": 32}),
    "narrow cache": Shape([1, 1, 1], [5, 90, 200], stored="float8_e4m3fn"),
    "scales": Shape([1, 1, 1], [5, 90, 200], heads=6, kv_heads=3, stored="float8_e4m3fn", scaled=True),
    "scales over splits": Shape(
        [1, 1],
        [90, 300],
        stored="float8_e4m3fn",
        scaled=True,
        sinks=True,
        settings={"decode_splits": 5, "decode_tile": 16},
    ),
    "scales under a softcap": Shape([1, 1], [20, 70], softcap=2.0, stored="float8_e5m2", scaled=True),
    "narrower fractions": Shape([1, 1], [90, 200], dtype="float16", stored="float8_e5m2"),
}
PREFILLS = {
    "fresh": Shape([30, 70], [30, 70]),
    "longer than a tile": Shape([150], [150]),
    "chunk after kept tokens": Shape([20, 40], [90, 200], settings={"prefill_tile": 16}),
    "a group of three": Shape([50], [70], heads=6, kv_heads=2),
    "one head": Shape([80], [100], heads=1, kv_heads=1),
    "head size 80": Shape([40], [60], size=80),
    "blocks of five": Shape([40], [60], block=5),
    "blocks of a tile": Shape([40], [160], block=64),
    "tokens outside heads": Shape([40], [60], layout=1),
    "window shorter than a tile": Shape([100], [130], window=7),
    "window of some tiles": Shape([80], [220], window=70, settings={"prefill_tile": 16}),
    "window longer than all": Shape([40], [60], window=500),
    "chunks shorter than a tile": Shape([100], [130], window=7, chunked=True),
    "chunks of some tiles": Shape([80, 150], [220, 150], window=70, chunked=True, settings={"prefill_tile": 16}),
    "softcap": Shape([40], [60], softcap=2.0),
    "sinks": Shape([40], [60], sinks=True),
    "half": Shape([40, 66], [90, 66], dtype="float16"),
    "narrow cache": Shape([40, 20], [90, 60], stored="float8_e4m3fn"),
    "scales": Shape([40, 20], [90, 60], heads=6, kv_heads=3, stored="float8_e4m3fn", scaled=True, sinks=True),
    "scales under a softcap": Shape([40], [60], window=30, softcap=2.0, stored="float8_e4m3fn", scaled=True),
}
MIXED = {
    "decodes and chunks": Shape([1, 1, 40, 50], [70, 3, 40, 90]),
    "short queries": Shape([1, 3, 2], [70, 33, 2], settings={"decode_splits": 3, "decode_tile": 16}),
    "drafts in a window": Shape([4, 4], [70, 33], window=9),
    "drafts with sinks": Shape([5, 5], [170, 33], sinks=True, settings={"decode_splits": 4, "decode_tile": 16}),
    "drafts at the edge of a chunk": Shape([4, 4, 4], [66, 64, 34], window=32, chunked=True),
    "one decode": Shape([1, 70], [16, 70], window=20),
}


@pytest.mark.parametrize("name", DECODES)
def test_decode(name: str) -> None:
    case = make_case(TRITON, DECODES[name])
    assert error(attended(TRITON, case), expected(case)) < TOLERANCE[case.shape.dtype]


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill(name: str) -> None:
    case = make_case(TRITON, PREFILLS[name])
    assert error(attended(TRITON, case), expected(case)) < TOLERANCE[case.shape.dtype]


@pytest.mark.parametrize("name", MIXED)
def test_mixed(name: str) -> None:
    case = make_case(TRITON, MIXED[name])
    assert error(attended(TRITON, case), expected(case)) < TOLERANCE[case.shape.dtype]


def test_counters_are_left_at_zero_for_the_next_layer() -> None:
    case = make_case(TRITON, Shape([1, 1], [90, 300], settings={"decode_splits": 5, "decode_tile": 16}))
    builder = TritonMetadataBuilder(case.env)
    builder.allocate(limits_of(case))
    layer, metadata = TRITON.layer(case.env, 0), builder.build(case.step)
    first, second = (attend(layer, case, metadata) for _ in range(2))
    assert metadata.scratch.counters.tolist() == [0] * len(metadata.scratch.counters)
    assert torch.equal(first, second)


def test_splits_are_used_where_the_batch_is_small() -> None:
    case = make_case(TRITON, Shape([1], [300], cores=132))
    builder = TritonMetadataBuilder(case.env)
    builder.allocate(limits_of(case))
    assert builder.build(case.step).plan.splits > 1
    assert error(attended(TRITON, case), expected(case)) < TOLERANCE["float32"]


def test_a_padding_sequence_gives_zeros() -> None:
    case = make_case(TRITON, Shape([1, 1], [40, 7]))
    case.step.lengths[1] = 0
    case.step.block_table[1] = 0
    found = attended(TRITON, case)
    assert error(found[:1], expected(case)[:1]) < TOLERANCE["float32"]
    assert found[1].abs().max() == 0


def test_a_recorded_step_reads_what_build_copied() -> None:
    case = make_case(TRITON, Shape([1, 1], [40, 70]))
    builder = TritonMetadataBuilder(case.env)
    builder.allocate(limits_of(case))
    recorded = builder.capture(2, 1)
    built = builder.build(case.step)
    assert built.lengths.data_ptr() == recorded.lengths.data_ptr()
    found = attend(TRITON.layer(case.env, 0), case, recorded)
    assert error(found, expected(case)) < TOLERANCE["float32"]


def test_a_long_query_cannot_be_recorded() -> None:
    case = make_case(TRITON, Shape([1], [40]))
    builder = TritonMetadataBuilder(case.env)
    builder.allocate(StepLimits(100, 2, 4, 100))
    with pytest.raises(NotImplementedError, match="triton records queries of at most 32 tokens"):
        builder.capture(2, 33)


def test_advance_goes_on_with_one_token_of_each_sequence() -> None:
    longer = make_case(TRITON, Shape([1, 1], [72, 35]))
    before = replace(longer.step, lengths=longer.step.lengths - 1)
    builder = TritonMetadataBuilder(longer.env)
    builder.allocate(limits_of(longer))
    builder.build(before)
    found = attend(TRITON.layer(longer.env, 0), longer, builder.advance(1))
    assert error(found, expected(longer)) < TOLERANCE["float32"]
    assert before.lengths.tolist() == [71, 34]


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int) -> None:
    draw = torch.Generator().manual_seed(100 + seed)

    def pick(*options: int) -> int:
        return options[int(torch.randint(len(options), (1,), generator=draw))]

    counts = sorted(pick(1, 1, 2, 17, 45) for _ in range(4))
    lengths = [count + pick(0, 1, 15, 16, 64, 130) for count in counts]
    kv_heads = pick(1, 2)
    shape = Shape(
        counts,
        lengths,
        heads=kv_heads * pick(1, 2, 4, 5),
        kv_heads=kv_heads,
        size=pick(16, 64, 96),
        block=pick(8, 16, 32, 64),
        window=pick(0, 0, 5, 40) or None,
        softcap=pick(0, 0, 3),
        layout=pick(0, 1),
        settings={"decode_splits": pick(1, 2, 6), "decode_tile": 16, "prefill_tile": 32},
    )
    case = make_case(TRITON, shape, seed)
    assert error(attended(TRITON, case), expected(case)) < TOLERANCE["float32"], shape


@pytest.mark.parametrize("parts", [("triton", "flash"), ("sdpa", "triton")])
def test_a_composite_shares_the_cache(parts: tuple[str, str]) -> None:
    named: dict[str, type[AttentionBackend]] = {
        "triton": TritonBackend,
        "flash": FlashAttnBackend,
        "sdpa": TorchSdpaBackend,
    }
    both = Composite(named[parts[0]], named[parts[1]])
    case = make_case(TRITON, Shape([1, 1, 40], [70, 3, 55]))
    case.step.lengths_host = case.step.lengths.numpy()
    # The other backend multiplies masked places by zero.
    for plane in case.cache.values():
        plane.nan_to_num_(0.0)
    builder = both.metadata_builder(case.env)
    builder.allocate(limits_of(case))
    found = attend(both.layer(case.env, 0), case, builder.build(case.step))
    assert error(found, expected(case)) < TOLERANCE["float32"]


@pytest.mark.parametrize("window", [7, 16])
@pytest.mark.parametrize("kind", STEPS)
def test_blocks_in_front_of_windows_may_be_somebody_elses(kind: str, window: int) -> None:
    shape = KitShape(head_size=32, value_size=32, block_size=16, window=window)
    case = make_kit_case(TRITON, shape, STEPS[kind])
    torch.testing.assert_close(run(TRITON, case).double(), reference(case), rtol=1e-5, atol=1e-5)
