"""The work, in torch. Legend: N new tokens of a sequence, L its tokens, K cache heads, D head size, P block size."""

from typing import Any

import torch
import torch.nn.functional as F

from jackfield.interfaces import HostLengths


class RocketBuilder:
    """Metadata of a step: for each sequence its first and last new token, its pages, and its length."""

    host_lengths = HostLengths.EXACT

    def __init__(self, env: Any) -> None:
        self.block = env.block_size

    def allocate(self, limits: Any) -> None:
        pass

    def build(self, step: Any) -> Any:
        ends, lengths = step.query_start_host.tolist(), step.lengths_host.tolist()
        pages = [row[: -(-length // self.block)] for row, length in zip(step.block_table, lengths, strict=True)]
        return list(zip(ends[:-1], ends[1:], pages, lengths, strict=True))


class RocketLayer:
    """Attention of one layer."""

    def __init__(self, env: Any, heads_first: bool) -> None:
        self.block, self.scale, self.heads_first = env.block_size, env.request.scale, heads_first

    def write(self, k_TKD: Any, v_TKD: Any, cache: Any, slots: Any) -> None:
        pages, places = slots[slots >= 0] // self.block, slots[slots >= 0] % self.block
        for name, new in (("k", k_TKD), ("v", v_TKD)):
            self._by_token(cache[name])[pages, places] = new[slots >= 0]

    def attend(self, q_THD: Any, cache: Any, metadata: Any, out_THD: Any) -> None:
        for start, stop, pages, length in metadata:
            k_KLD, v_KLD = (self._by_token(cache[name])[pages].flatten(0, 1)[:length].transpose(0, 1) for name in "kv")
            mask_NL = torch.ones(stop - start, length, dtype=torch.bool, device=pages.device).tril(
                length - stop + start
            )
            q_HND, more = q_THD[start:stop].transpose(0, 1), {"scale": self.scale, "enable_gqa": True}
            mixed = F.scaled_dot_product_attention(q_HND[None], k_KLD[None], v_KLD[None], mask_NL, **more)
            out_THD[start:stop] = mixed[0].transpose(0, 1)

    def _by_token(self, plane: Any) -> Any:
        """Return a plane as [pages, P, K, D]."""
        return plane.transpose(1, 2) if self.heads_first else plane
