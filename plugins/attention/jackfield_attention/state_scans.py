"""Recurrences in plain torch: chunk by chunk for prompts, one step for decoding.

Legend: T tokens of one sequence, B sequences, H heads, K key (state) size, V value size, I channels, N states of a
channel. States and decays are float32.
"""

from __future__ import annotations

import torch

CHUNK = 64
SCAN_CHUNK = 32
"""The scan holds every state of a chunk."""


def selective_scan(
    a_IN: torch.Tensor,
    x_TI: torch.Tensor,
    dt_TI: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    state_IN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, I] and the last state of Mamba's recurrence (arXiv:2312.00752, equation 2):
    ``h_t = exp(dt_t a) h_{t-1} + dt_t b_t x_t``, ``y_t = c_t h_t``.

    Inside a chunk, pairs (decay, input) are combined with those 1, 2, 4 ... tokens before (Hillis and Steele's scan),
    which only ever multiplies decays: nothing overflows.
    """
    outputs = []
    for start in range(0, len(x_TI), SCAN_CHUNK):
        part = slice(start, start + SCAN_CHUNK)
        decay_TIN = torch.exp(dt_TI[part].unsqueeze(-1) * a_IN)
        h_TIN = (dt_TI[part] * x_TI[part]).unsqueeze(-1) * b_TN[part].unsqueeze(1)
        h_TIN[0] += decay_TIN[0] * state_IN
        _scan(decay_TIN, h_TIN)
        outputs.append(torch.einsum("tin,tn->ti", h_TIN, c_TN[part]))
        state_IN = h_TIN[-1]
    return torch.cat(outputs), state_IN


def _scan(decay: torch.Tensor, values: torch.Tensor) -> None:
    """Make ``values[t]`` the sum of what came before, each times the decays since; in place."""
    reach = 1
    while reach < len(values):
        values[reach:] += decay[reach:] * values[:-reach].clone()
        decay[reach:] *= decay[:-reach].clone()
        reach *= 2


def selective_step(
    a_IN: torch.Tensor,
    x_BI: torch.Tensor,
    dt_BI: torch.Tensor,
    b_BN: torch.Tensor,
    c_BN: torch.Tensor,
    state_BIN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [B, I] and states behind one more token of each sequence."""
    added = (dt_BI * x_BI).unsqueeze(-1) * b_BN.unsqueeze(1)
    state_BIN = torch.exp(dt_BI.unsqueeze(-1) * a_IN) * state_BIN + added
    return torch.einsum("bin,bn->bi", state_BIN, c_BN), state_BIN


def decayed_attention(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_TH: torch.Tensor, state_HKV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, H, V] and the last state of ``S_t = exp(g_t) S_{t-1} + k_t v_t'``, ``o_t = S_t' q_t``.

    Mamba-2 (arXiv:2405.21060, section 6) and linear attention with decay (arXiv:2401.04658) are this: inside a chunk
    the quadratic form with decays between tokens, between chunks the state.
    """
    outputs = []
    for start in range(0, len(q_THK), CHUNK):
        part = slice(start, start + CHUNK)
        q, k, v = (x[part].transpose(0, 1) for x in (q_THK, k_THK, v_THV))
        total_HT = g_TH[part].T.cumsum(-1)
        between_HTS = decays_between(total_HT)
        inside = (q @ k.transpose(1, 2) * between_HTS) @ v
        before = total_HT.exp().unsqueeze(-1) * (q @ state_HKV)
        outputs.append((inside + before).transpose(0, 1))
        left_HT = (total_HT[:, -1:] - total_HT).exp()
        state_HKV = total_HT[:, -1, None, None].exp() * state_HKV + (k * left_HT.unsqueeze(-1)).transpose(1, 2) @ v
    return torch.cat(outputs), state_HKV


def decays_between(total_HT: torch.Tensor) -> torch.Tensor:
    """Return [H, T, S] how much of token s is left at token t >= s; 0 for later ones. ``total`` are sums of logs."""
    size = total_HT.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total_HT.device).triu(1)
    return (total_HT.unsqueeze(-1) - total_HT.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()


def decayed_step(
    q_BHK: torch.Tensor, k_BHK: torch.Tensor, v_BHV: torch.Tensor, g_BH: torch.Tensor, state_BHKV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [B, H, V] and states behind one more token of each sequence."""
    state_BHKV = g_BH.exp()[..., None, None] * state_BHKV + k_BHK.unsqueeze(-1) * v_BHV.unsqueeze(-2)
    return torch.einsum("bhkv,bhk->bhv", state_BHKV, q_BHK), state_BHKV


def delta_attention(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THJ: torch.Tensor,
    beta_TH: torch.Tensor,
    state_HKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, H, V] and the last state of the gated delta rule (arXiv:2412.06464, equation 10):
    ``S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})' k_t)'``, ``o_t = S_t' q_t``.

    Decays ``g`` [T, H, J] are one for each head (J = 1) or one for each feature of a key (J = K; Kimi Delta Attention,
    arXiv:2510.26692). Inside a chunk, what each token really adds is the solution of a triangular system (the WY form,
    arXiv:2406.06484, section 3.2); between chunks the state is handed on.
    """
    outputs = []
    size = CHUNK if g_THJ.shape[-1] == 1 else SCAN_CHUNK
    for start in range(0, len(q_THK), size):
        part = slice(start, start + size)
        q, k, v, total_HTJ = (x[part].transpose(0, 1) for x in (q_THK, k_THK, v_THV, g_THJ))
        total_HTJ = total_HTJ.cumsum(1)
        beta_HT1 = beta_TH[part].T.unsqueeze(-1)
        past_HTS = (_decayed_products(k, k, total_HTJ) * beta_HT1).tril(-1)
        known = torch.cat((v, k * total_HTJ.exp()), -1) * beta_HT1
        solved = torch.linalg.solve_triangular(past_HTS, known, upper=False, unitriangular=True)
        added_HTV = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ state_HKV
        inside = _decayed_products(q, k, total_HTJ) @ added_HTV
        outputs.append((inside + (q * total_HTJ.exp()) @ state_HKV).transpose(0, 1))
        left_HTJ = (total_HTJ[:, -1:] - total_HTJ).exp()
        state_HKV = total_HTJ[:, -1].exp().unsqueeze(-1) * state_HKV + (k * left_HTJ).transpose(1, 2) @ added_HTV
    return torch.cat(outputs), state_HKV


def _decayed_products(a_HTK: torch.Tensor, b_HSK: torch.Tensor, total_HTJ: torch.Tensor) -> torch.Tensor:
    """Return [H, T, S] products of a_t and b_s times what is left of s at t, 0 for later s."""
    if total_HTJ.shape[-1] == 1:
        return a_HTK @ b_HSK.transpose(1, 2) * decays_between(total_HTJ[..., 0])
    left_HKTS = torch.unflatten(decays_between(total_HTJ.transpose(1, 2).flatten(0, 1)), 0, (len(a_HTK), -1))
    return torch.einsum("htk,hsk,hkts->hts", a_HTK, b_HSK, left_HKTS)


def delta_step(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    g_BHJ: torch.Tensor,
    beta_BH: torch.Tensor,
    state_BHKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [B, H, V] and states behind one more token of each sequence."""
    state_BHKV = g_BHJ.exp().unsqueeze(-1) * state_BHKV
    added_BHV = (v_BHV - torch.einsum("bhkv,bhk->bhv", state_BHKV, k_BHK)) * beta_BH.unsqueeze(-1)
    state_BHKV = state_BHKV + k_BHK.unsqueeze(-1) * added_BHV.unsqueeze(-2)
    return torch.einsum("bhkv,bhk->bhv", state_BHKV, q_BHK), state_BHKV
