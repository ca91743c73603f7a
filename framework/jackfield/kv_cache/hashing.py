"""Chain hashes of blocks: a block's hash covers every token before it, so equal hashes mean equal prefixes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt


class BlockHasher:
    """Hashes full blocks of one sequence, one after another (sha256).

    Args:
        block_size: tokens in a block. salt: separates tenants. adapter: separates weight adapters.
        features: hashes of multimodal items with the token position each starts at.
    """

    def __init__(
        self, block_size: int, salt: str = "", adapter: str = "", features: tuple[tuple[int, bytes], ...] = ()
    ) -> None:
        self._block_size = block_size
        self._features = features
        root = repr((salt, adapter)).encode()
        self._chain = hashlib.sha256(root).digest()
        self.hashes: list[bytes] = []

    def extend(self, token_ids: npt.NDArray[Any]) -> None:
        """Hash all full blocks of ``token_ids`` (the whole sequence so far) that were not hashed before."""
        size = self._block_size
        for start in range(len(self.hashes) * size, len(token_ids) - size + 1, size):
            digest = hashlib.sha256(self._chain)
            digest.update(np.ascontiguousarray(token_ids[start : start + size], dtype=np.int32).tobytes())
            for position, item in self._features:
                if start <= position < start + size:
                    digest.update(position.to_bytes(8, "little") + item)
            self._chain = digest.digest()
            self.hashes.append(self._chain)
