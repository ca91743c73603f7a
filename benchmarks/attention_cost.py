"""Decode attention costs what the sum of lengths costs: times one attend of a layer for batches with equal sums.

    python benchmarks/attention_cost.py [--sequences 16] [--length 512] [--block-size 32]

Three batches are timed: n sequences of L tokens; one long sequence and n - 1 short ones with the same sum; and, to
compare, n sequences that are all as long as that one, which is what padding to the longest would cost.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from jackfield.interfaces import AttentionEnv, AttentionRequest, AttentionStep
from jackfield_attention.torch_sdpa import TorchSdpaBackend

CPU = torch.device("cpu")


def decode_step(lengths: list[int], block_size: int) -> AttentionStep:
    """Return a step with one new token for each sequence."""
    count = len(lengths)
    blocks = [-(-length // block_size) for length in lengths]
    table = np.zeros((count, max(blocks)), dtype=np.int32)
    pages = np.random.default_rng(0).permutation(np.arange(1, sum(blocks) + 1, dtype=np.int32))
    for row, held in enumerate(np.split(pages, np.cumsum(blocks)[:-1])):
        table[row, : len(held)] = held
    positions = np.array(lengths, dtype=np.int64) - 1
    slots = table[np.arange(count), positions // block_size].astype(np.int64) * block_size + positions % block_size
    starts = np.arange(count + 1, dtype=np.int32)
    host = np.array(lengths, dtype=np.int32)
    return AttentionStep(
        num_tokens=count,
        num_sequences=count,
        num_decodes=count,
        max_query=1,
        max_length=max(lengths),
        query_start=torch.from_numpy(starts),
        lengths=torch.from_numpy(host),
        block_table=torch.from_numpy(table),
        slots=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
        query_start_host=starts,
        lengths_host=host,
    )


def seconds(lengths: list[int], block_size: int, repeats: int) -> float:
    """Return the best time of one attend (build and layer) of a batch."""
    heads, kv_heads, size = 9, 3, 64
    request = AttentionRequest(
        kind="full",
        dtype="float32",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        value_head_size=size,
        scale=size**-0.5,
    )
    env = AttentionEnv(request, TorchSdpaBackend.cache_specs(request)[0], block_size, CPU)
    step, builder = decode_step(lengths, block_size), TorchSdpaBackend.metadata_builder(env)
    layer = TorchSdpaBackend.layer(env, 0)
    pages = sum(-(-length // block_size) for length in lengths) + 1
    cache = {name: torch.randn(pages, kv_heads, block_size, size) for name in ("k", "v")}
    q, out = torch.randn(len(lengths), heads, size), torch.empty(len(lengths), heads, size)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        layer.attend(q, cache, builder.build(step), out)
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    count, length = options.sequences, options.length
    short = max(1, length // 16)
    longest = count * length - (count - 1) * short
    batches = {
        f"{count} x {length}": [length] * count,
        f"1 x {longest} and {count - 1} x {short}": [longest] + [short] * (count - 1),
        f"{count} x {longest} (padded to the longest)": [longest] * count,
    }
    print(f"{'batch':<48}{'sum':>10}{'ms':>10}{'ns a token':>12}")
    for name, lengths in batches.items():
        took = seconds(lengths, options.block_size, options.repeats)
        print(f"{name:<48}{sum(lengths):>10}{took * 1e3:>10.2f}{took / sum(lengths) * 1e9:>12.1f}")


if __name__ == "__main__":
    main()
