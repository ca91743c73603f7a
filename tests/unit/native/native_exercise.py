"""Every kernel once or more at odd sizes, against the references; also a program for sanitizers:
``native_exercise.py LIBRARY [too short]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from native_world import block_values, bound, rounding_bound, stored, values_of

import jackfield_attention.native_cpu_layer
import jackfield_native.products
import jackfield_ops.native_calls
from jackfield.interfaces import AttentionEnv, AttentionRequest
from jackfield.layers.functional import REFERENCES
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_attention.native_cpu_layer import NativeLayer, NativeMetadata
from jackfield_native.library import TYPES, load
from jackfield_native.products import PACKED, Weight

MODULES = (jackfield_native.products, jackfield_ops.native_calls, jackfield_attention.native_cpu_layer)


def use(library: Any, assign: Callable[[Any, str, Any], None]) -> None:
    """Let all calls go to ``library``."""
    for module in MODULES:
        assign(module, "kernels", lambda: library)


def exercise() -> None:
    """Call everything."""
    for word in TYPES:
        products(word)
    ops()
    attention()


def products(word: str) -> None:
    """Products of one to seven rows, with outputs that fill no tile and columns that fill no part."""
    columns = 2 * max(32, block_values(word)) + (5 if block_values(word) == 1 else 0)
    weight = stored(word, 7, columns)
    values = values_of(weight, word)
    for rows in (1, 2, 7):
        x, bias = torch.randn(rows, columns), torch.randn(7)
        want = x.double() @ values.double().t() + bias.double()
        out = Weight([(weight, word)], columns).few_rows(x, bias, torch.empty(rows, 7))
        assert ((out.double() - want).abs() <= bound(x, values)).all()
        if word in PACKED:
            out = Weight([(weight, word)], columns, integers=True).few_rows(x, bias, torch.empty(rows, 7))
            assert ((out.double() - want).abs() <= rounding_bound(x, values)).all()


def ops() -> None:
    """All ops at widths that fill no vector."""
    for width in (1, 7, 17, 50):
        x, other, weight = torch.randn(3, width), torch.randn(3, width), torch.randn(width)
        heads, angles = torch.randn(3, 2, 2 * width), torch.randn(3, width)
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        arguments: dict[str, tuple[Any, ...]] = {
            "rms_norm": (x, weight, 1e-5),
            "fused_add_rms_norm": (x, other, weight, 1e-5),
            "rotary": (heads, cos_sin),
        }
        for op, call in jackfield_ops.native_calls.CALLS.items():
            given = arguments.get(op, (torch.randn(3, 2 * width),))
            want = REFERENCES[op](*(part.clone() if isinstance(part, torch.Tensor) else part for part in given))
            torch.testing.assert_close(call(*given), want, rtol=1e-5, atol=1e-5)


def attention() -> None:
    """Three sequences over pages of five, with heads of 7 and values of 9."""
    request = AttentionRequest(
        kind="full", num_heads=4, num_kv_heads=2, head_size=7, value_head_size=9, scale=0.3, dtype="float32"
    )
    (spec,) = NativeCpuBackend.cache_specs(request)
    layer = NativeLayer(AttentionEnv(request, spec, 5, torch.device("cpu")))
    cache = {"k": torch.zeros(8, 2, 5, 7), "v": torch.zeros(8, 2, 5, 9)}
    table = torch.tensor([[1, 2, 3], [4, 0, 0], [7, 6, 0]], dtype=torch.int32)
    for row, length in enumerate((13, 1, 10)):
        place = torch.arange(length)
        slots = table[row, place // 5].long() * 5 + place % 5
        layer.write(torch.randn(length, 2, 7), torch.randn(length, 2, 9), cache, slots)
    qkv = torch.randn(3, 4 * 7 + 2 * 7 + 2 * 9)
    angles = torch.randn(3, 3)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    layer.prepare(qkv, cos_sin, torch.randn(7), torch.randn(7), 1e-5, cache, torch.tensor([3 * 5 + 2, 4 * 5, -1]))
    rows = torch.tensor([[0, 1, 2], [0, 1, 2], [2, 0, 0], [13, 1, 10]], dtype=torch.int32).numpy()
    q, out = qkv[:, :28].view(3, 4, 7), torch.empty(3, 4, 9)
    layer.attend(q, cache, NativeMetadata(torch.from_numpy(rows), table, []), out)
    keys, values = (plane[table[2, :2].long()].transpose(1, 2).flatten(0, 1) for plane in (cache["k"], cache["v"]))
    weights = torch.einsum("hd,lhd->hl", q[2] * 0.3, keys.repeat_interleave(2, 1)).softmax(-1)
    torch.testing.assert_close(out[2], torch.einsum("hl,lhv->hv", weights, values.repeat_interleave(2, 1)))


def main() -> None:
    """Run everything on a built library; with a second argument read behind the end of a weight."""
    library = load(Path(sys.argv[1]))
    use(library, setattr)
    torch.set_num_threads(2)
    if len(sys.argv) > 2:
        short, out = stored("Q4_1", 3, 64).clone(), torch.empty(4, 64)
        library.jf_decode(TYPES["Q4_1"], short.data_ptr(), 40, out.data_ptr(), 64, 4, 64, 1)
    exercise()
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
