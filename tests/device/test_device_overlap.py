"""Kernels that start while the ones before them drain, against kernels that do not: the same bits."""

from __future__ import annotations

import pytest
import torch
from chain import Chain, Sizes
from paged_case import Shape
from recording import record

from jackfield_platforms.cuda_device import CudaGraphs

pytestmark = pytest.mark.gpu

REPLAYS = 200


def shape_of(rows: int) -> Shape:
    """Return as many sequences, of 200 to 1,000 tokens, on all multiprocessors."""
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    lengths = [1000 - 800 * row // rows for row in range(rows)]
    return Shape([1] * rows, lengths, 16, 8, 128, 64, dtype="bfloat16", device="cuda", cores=cores)


def replayed(chain: Chain) -> torch.Tensor:
    """Return the outputs of a graph of the whole chain, one for each replay; the host waits for none of them."""
    chain.set_step(0)
    chain.run()
    torch.cuda.synchronize()
    graphs = CudaGraphs()
    graph = record(graphs, chain.run)
    outputs = chain.out.new_full((REPLAYS, *chain.out.shape), torch.nan)
    for number, output in enumerate(outputs):
        chain.set_step(number)
        graphs.replay(graph)
        output.copy_(chain.out)
    return outputs


@pytest.mark.parametrize("rows", [1, 2, 4, 16])
def test_a_graph_of_overlapping_kernels_gives_the_bits_of_one_that_does_not_overlap(rows: int) -> None:
    overlapping, apart = (Chain(shape_of(rows), Sizes(), pdl) for pdl in (True, False))
    assert overlapping.blocks[0].attention.pdl == (torch.cuda.get_device_capability() >= (9, 0))
    assert not apart.blocks[0].attention.pdl
    found, wanted = replayed(overlapping), replayed(apart)
    assert wanted.isfinite().all()
    assert not torch.equal(wanted[0], wanted[1])
    assert torch.equal(found, wanted)
    for plane, same in zip(overlapping.planes(), apart.planes(), strict=True):
        assert torch.equal(plane, same)


@pytest.mark.parametrize("rows", [1, 4])
def test_folded_norms_and_activations_change_rounding_alone(rows: int) -> None:
    folded, apart = (Chain(shape_of(rows), Sizes(), True, fold) for fold in (True, False))
    for chain in (folded, apart):
        chain.set_step(0)
        chain.run()
    assert not torch.equal(folded.out, apart.out)
    assert float((folded.out.float() - apart.out.float()).norm() / apart.out.float().norm()) < 2e-2


def test_overlapping_kernels_launched_one_by_one_give_the_same_bits() -> None:
    overlapping, apart = (Chain(shape_of(1), Sizes(), pdl) for pdl in (True, False))
    for number in range(REPLAYS):
        for chain in (overlapping, apart):
            chain.set_step(number)
            chain.run()
        assert torch.equal(overlapping.out, apart.out), number
