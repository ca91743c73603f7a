# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Activations in kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(gate, KIND: tl.constexpr):
    """Return silu, exact gelu or tanh gelu of float32 values; tanh by way of a sigmoid, which cannot overflow."""
    if KIND == "silu":
        return gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu":
        return 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
