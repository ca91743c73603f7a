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

    def pick(self, cache: Cache, name: str, pages: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return copies of single vectors, [*, K, D] in the computation type; ``pages`` and ``places`` are [*]."""
        ...


Scales = Mapping[str, torch.Tensor | None]
"""[K] by plane: 8-bit floats are divided by them; None for 1."""


def make_store(kind: str, dtype: torch.dtype, scales: Scales | None = None) -> Store:
    """Return the store for a storage type, as torch or ``cache_types`` name it."""
    if kind in ("int8", "int4"):
        return IntegerStore(4 if kind == "int4" else 8, dtype)
    stored = getattr(torch, kind)
    return PlainStore(dtype) if stored.itemsize > 1 else FloatStore(stored, dtype, scales or {})


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

    def pick(self, cache: Cache, name: str, pages: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """See Store."""
        return cache[name][pages, :, places]


class FloatStore:
    """8-bit floats, divided by a scale for each head where there are some."""

    def __init__(self, stored: torch.dtype, dtype: torch.dtype, scales: Scales) -> None:
        self._stored, self._dtype, self._scales = stored, dtype, scales
        self._largest = torch.finfo(stored).max

    def write(self, cache: Cache, name: str, x_TKD: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> None:
        """See Store; numbers beyond the type's become its largest."""
        scale_K = self._scales.get(name)
        if scale_K is not None:
            x_TKD = x_TKD.to(torch.promote_types(x_TKD.dtype, torch.float32)) / scale_K.unsqueeze(-1)
        narrow = x_TKD.clamp(-self._largest, self._largest).to(self._stored)
        # Indexing is not made for 8-bit floats everywhere; bytes are bytes.
        cache[name].view(torch.uint8)[pages, :, places] = narrow.view(torch.uint8)

    def read(self, cache: Cache, name: str, pages: torch.Tensor) -> torch.Tensor:
        """See Store."""
        narrow = cache[name].view(torch.uint8).index_select(0, pages).view(self._stored)
        return self._widened(name, narrow, 2)

    def pick(self, cache: Cache, name: str, pages: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """See Store."""
        return self._widened(name, cache[name].view(torch.uint8)[pages, :, places].view(self._stored), 1)

    def _widened(self, name: str, narrow: torch.Tensor, behind: int) -> torch.Tensor:
        """Return numbers in the computation type; there are ``behind`` dimensions behind the heads."""
        scale_K = self._scales.get(name)
        if scale_K is None:
            return narrow.to(self._dtype)
        wide = torch.promote_types(self._dtype, torch.float32)
        return (narrow.to(wide) * scale_K.view(-1, *(1,) * behind)).to(self._dtype)


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
        return self._widened(*(cache[part].index_select(0, pages) for part in (name, f"{name}_scale")))

    def pick(self, cache: Cache, name: str, pages: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """See Store."""
        return self._widened(*(cache[part][pages, :, places] for part in (name, f"{name}_scale")))

    def _widened(self, whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self._packed:
            whole = torch.cat((whole & 15, whole >> 4), -1).to(torch.int8) - 8
        return (whole.float() * scale.unsqueeze(-1)).to(self._dtype)
