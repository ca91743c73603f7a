"""Keys and values as they are stored: plain, in 8-bit floats, or in integers with a scale for each token and head.

Legend: T tokens, C pages, K heads, P block size, D size of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

Cache = Mapping[str, torch.Tensor]


class Store(Protocol):
    """How vectors go into pages ``[pages, K, P, ...]`` and come out of them."""

    def write(self, cache: Cache, name: str, x_TKD: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> None:
        """Store vectors of new tokens."""
        ...

    def read(self, cache: Cache, name: str, pages: torch.Tensor) -> torch.Tensor:
        """Return a copy of whole pages, [C, K, P, D] in the computation type."""
        ...


def make_store(kind: str, dtype: torch.dtype) -> Store:
    """Return the store for a storage type, as torch or ``cache_types`` name it."""
    if kind in ("int8", "int4"):
        return IntegerStore(4 if kind == "int4" else 8, dtype)
    stored = getattr(torch, kind)
    return PlainStore(dtype) if stored.itemsize > 1 else FloatStore(stored, dtype)


class PlainStore:
    """As computed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def write(self, cache: Cache, name: str, x_TKD: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> None:
        """See Store."""
        cache[name][pages, :, places] = x_TKD.to(cache[name].dtype)

    def read(self, cache: Cache, name: str, pages: torch.Tensor) -> torch.Tensor:
        """See Store."""
        return cache[name].index_select(0, pages)


class FloatStore:
    """8-bit floats."""

    def __init__(self, stored: torch.dtype, dtype: torch.dtype) -> None:
        self._stored, self._dtype = stored, dtype
        self._largest = torch.finfo(stored).max

    def write(self, cache: Cache, name: str, x_TKD: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> None:
        """See Store; numbers beyond the type's become its largest."""
        narrow = x_TKD.clamp(-self._largest, self._largest).to(self._stored)
        # Indexing is not made for 8-bit floats everywhere; bytes are bytes.
        cache[name].view(torch.uint8)[pages, :, places] = narrow.view(torch.uint8)

    def read(self, cache: Cache, name: str, pages: torch.Tensor) -> torch.Tensor:
        """See Store."""
        return cache[name].view(torch.uint8).index_select(0, pages).view(self._stored).to(self._dtype)


class IntegerStore:
    """8 or 4 bits, symmetric, with the largest number of a vector as the largest integer. Two of 4 bits share a byte:
    of the first half of the vector the low ones, of the second half the high ones.
    """

    def __init__(self, bits: int, dtype: torch.dtype) -> None:
        self._largest, self._packed, self._dtype = 2 ** (bits - 1) - 1, bits == 4, dtype

    def write(self, cache: Cache, name: str, x_TKD: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> None:
        """See Store."""
        scale_TK = x_TKD.float().abs().amax(-1).clamp_min(1e-12) / self._largest
        whole = (x_TKD.float() / scale_TK.unsqueeze(-1)).round().to(torch.int8)
        if self._packed:
            low, high = (whole + 8).to(torch.uint8).chunk(2, -1)
            whole = low | (high << 4)
        cache[name][pages, :, places] = whole
        cache[f"{name}_scale"][pages, :, places] = scale_TK

    def read(self, cache: Cache, name: str, pages: torch.Tensor) -> torch.Tensor:
        """See Store."""
        whole = cache[name].index_select(0, pages)
        if self._packed:
            whole = torch.cat((whole & 15, whole >> 4), -1).to(torch.int8) - 8
        scale_CKP = cache[f"{name}_scale"].index_select(0, pages)
        return (whole.float() * scale_CKP.unsqueeze(-1)).to(self._dtype)
