"""EAGLE-3's layer in plain torch, with gradients; its parameters have the names of the published checkpoints.

Legend: B documents, L tokens of the longest, E width, F width of the taps, H heads, G heads of keys, D size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from jackfield_spec_decode.training_goals import ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Sizes of the layer. ``features``: F. ``theta``: of the rotary embedding. Others as of any decoder."""

    width: int
    features: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    inner: int
    eps: float
    theta: float


class RmsNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., E]."""
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps) * self.weight


@dataclass(slots=True)
class Seen:
    """Keys and values of the steps so far, [B, H, L, D] each; those of the first step first."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class UnrolledAttention(nn.Module):
    """Attention of a step that goes on from each token on its own.

    In step k, row i stands at place i + k. It sees the first step's keys up to place i, which are made from the
    target's states, and behind those its own of steps 1 to k: what lies in the cache when k drafts were made.
    """

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self._sizes, size = sizes, sizes.head_size
        self.q_proj = nn.Linear(2 * sizes.width, sizes.num_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * sizes.width, sizes.num_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * sizes.width, sizes.num_kv_heads * size, bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * size, sizes.width, bias=False)

    def forward(self, x_BLW: torch.Tensor, seen: Seen) -> torch.Tensor:
        """Return what attention adds, [B, L, E], and put the step's keys and values into ``seen``."""
        sizes, step = self._sizes, len(seen.keys)
        q, k, v = (self._heads(project(x_BLW)) for project in (self.q_proj, self.k_proj, self.v_proj))
        angles_LD = self._angles(x_BLW, step)
        repeat = sizes.num_heads // sizes.num_kv_heads
        seen.keys.append(rotated(k, angles_LD).repeat_interleave(repeat, 1))
        seen.values.append(v.repeat_interleave(repeat, 1))
        mixed_BHLD = self._attend(rotated(q, angles_LD), seen)
        out_BLE: torch.Tensor = self.o_proj(mixed_BHLD.transpose(1, 2).flatten(2))
        return out_BLE

    def _attend(self, q_BHLD: torch.Tensor, seen: Seen) -> torch.Tensor:
        keys, values = seen.keys, seen.values
        if len(keys) == 1:
            return F.scaled_dot_product_attention(q_BHLD, keys[0], values[0], is_causal=True)
        length, scale = q_BHLD.shape[2], q_BHLD.shape[3] ** -0.5
        later_LL = torch.ones(length, length, dtype=torch.bool, device=q_BHLD.device).triu(1)
        first_BHLL = (q_BHLD @ keys[0].transpose(2, 3)).masked_fill(later_LL, float("-inf"))
        own = [(q_BHLD * key).sum(-1, keepdim=True) for key in keys[1:]]
        shares = (torch.cat((first_BHLL, *own), -1).float() * scale).softmax(-1).to(values[0].dtype)
        mixed_BHLD: torch.Tensor = shares[..., :length] @ values[0]
        for at, value in enumerate(values[1:], length):
            mixed_BHLD = mixed_BHLD + shares[..., at, None] * value
        return mixed_BHLD

    def _heads(self, x_BLN: torch.Tensor) -> torch.Tensor:
        """Return [B, heads, L, D]."""
        return x_BLN.view(*x_BLN.shape[:2], -1, self._sizes.head_size).transpose(1, 2)

    def _angles(self, x_BLW: torch.Tensor, step: int) -> torch.Tensor:
        """Return [L, D / 2] the angles of the places at which a step's rows stand (arXiv:2104.09864)."""
        size = self._sizes.head_size
        powers = -torch.arange(0, size, 2, device=x_BLW.device).float() / size
        rates = torch.pow(self._sizes.theta, powers)
        return (torch.arange(x_BLW.shape[1], device=x_BLW.device).float() + step)[:, None] * rates


def rotated(x_BHLD: torch.Tensor, angles_LD: torch.Tensor) -> torch.Tensor:
    """Return queries or keys rotated: feature j of the first half with feature j of the second."""
    cos, sin = angles_LD.cos(), angles_LD.sin()
    first, second = x_BHLD.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BHLD.dtype)


class Mlp(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.down_proj = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x_BLE: torch.Tensor) -> torch.Tensor:
        """Return [B, L, E]."""
        out_BLE: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x_BLE)) * self.up_proj(x_BLE))
        return out_BLE


class MidLayer(nn.Module):
    """The decoder layer: attention takes the normalized token and features, side by side."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.width, sizes.eps)
        self.hidden_norm = RmsNorm(sizes.width, sizes.eps)
        self.post_attention_layernorm = RmsNorm(sizes.width, sizes.eps)
        self.self_attn = UnrolledAttention(sizes)
        self.mlp = Mlp(sizes)

    def forward(self, embeds_BLE: torch.Tensor, stream_BLE: torch.Tensor, seen: Seen) -> torch.Tensor:
        """Return the stream behind the layer."""
        x_BLW = torch.cat((self.input_layernorm(embeds_BLE), self.hidden_norm(stream_BLE)), -1)
        stream_BLE = stream_BLE + self.self_attn(x_BLW, seen)
        out_BLE: torch.Tensor = stream_BLE + self.mlp(self.post_attention_layernorm(stream_BLE))
        return out_BLE


class Eagle3Network(nn.Module):
    """All that an EAGLE-3 checkpoint has. ``vocab``: tokens of its head."""

    def __init__(self, sizes: LayerSizes, vocab: int) -> None:
        super().__init__()
        self.fc = nn.Linear(sizes.features, sizes.width, bias=False)
        self.midlayer = MidLayer(sizes)
        self.norm = RmsNorm(sizes.width, sizes.eps)
        self.lm_head = nn.Linear(sizes.width, vocab, bias=False)

    def forward(self, embeds_BLE: torch.Tensor, taps_BLF: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Yield for each step the states [B, L, E] that the head is given: row i of step k is what comes behind token
        i + 1 + k. The first step has the target's states for features, every other one those of the step before.
        """
        stream_BLE, seen = self.fc(taps_BLF), Seen([], [])
        for step in range(steps):
            stream_BLE = self.midlayer(ahead(embeds_BLE, step + 1), stream_BLE, seen)
            yield self.norm(stream_BLE)
