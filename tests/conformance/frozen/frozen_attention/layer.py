"""The work, in torch. T tokens, H query heads, K cache heads, D head size; planes are [pages, block, K, D]."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits


class Builder:
    """Hands the step on as it is."""

    host_lengths = HostLengths.EXACT

    def allocate(self, limits: StepLimits) -> None:
        pass

    def build(self, step: AttentionStep) -> AttentionStep:
        return step


class Layer:
    """Attention of one layer."""

    def __init__(self, env: AttentionEnv) -> None:
        self.block, self.scale = env.block_size, env.request.scale

    def write(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor
    ) -> None:
        keep = slots >= 0  # a negative slot is not written
        pages, places = slots[keep] // self.block, slots[keep] % self.block
        cache["k"][pages, places], cache["v"][pages, places] = k_TKD[keep], v_TKD[keep]

    def attend(
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], step: AttentionStep, out_THD: torch.Tensor
    ) -> None:
        assert step.lengths_host is not None  # host_lengths is EXACT
        for row, length in enumerate(step.lengths_host.tolist()):
            first, last = step.query_start_host[row : row + 2].tolist()
            pages = step.block_table[row, : -(-length // self.block)]
            k, v = (cache[name][pages].flatten(0, 1)[:length].transpose(0, 1) for name in "kv")
            mask = torch.ones(last - first, length, dtype=torch.bool, device=q_THD.device).tril(length - last + first)
            q = q_THD[first:last].transpose(0, 1)
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=self.scale, enable_gqa=True)
            out_THD[first:last] = out[0].transpose(0, 1)
