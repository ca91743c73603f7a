"""The ops around the model in a recorded step, in torch: what a step computes from the tables of running sequences, and
what it leaves in them. Plain device work with no sizes that depend on data.

Legend: S slots, L longest text, M blocks of a sequence, B sequences of the step, N tokens of each, T = B N, K = N - 1
drafts, R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from jackfield.interfaces import TokenInputs


def greedy_tokens(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return [R] int64 the largest logit of each row; of equal ones the first."""
    return logits_RV.argmax(-1)


def token_inputs(
    tokens_SL: torch.Tensor,
    table_SM: torch.Tensor,
    slots_B: torch.Tensor,
    starts_B: torch.Tensor,
    counts_B: torch.Tensor | None,
    width: int,
    block_size: int,
    shift: int = 0,
) -> TokenInputs:
    """Return what a step of ``width`` = N tokens for each sequence takes from the tables. Of tokens that do not count
    the position is 0 and the place in the cache -1.

    Args:
        tokens_SL, table_SM: int32. slots_B, starts_B: int64. counts_B: int64, how many of each sequence's tokens count;
            None: all. shift: begin so many tokens later, with so many fewer that count.
    """
    starts_B = starts_B + shift
    place_N = torch.arange(width, device=slots_B.device)
    places_BN, owner_B1 = starts_B.unsqueeze(1) + place_N, slots_B.unsqueeze(1)
    table_BM, last = table_SM[slots_B], tokens_SL.shape[1] - 1
    blocks_BN = table_BM.gather(1, (places_BN // block_size).clamp(max=table_BM.shape[1] - 1)).long()
    cells_BN, positions_BN = blocks_BN * block_size + places_BN % block_size, places_BN
    if counts_B is not None:
        real_BN = place_N + shift < counts_B.unsqueeze(1)
        cells_BN, positions_BN = torch.where(real_BN, cells_BN, -1), torch.where(real_BN, places_BN, 0)
    ids_BN, next_BN = (tokens_SL[owner_B1, (places_BN + more).clamp(max=last)].long() for more in (0, 1))
    ids_T, next_T, positions_T, cells_T = (part.flatten() for part in (ids_BN, next_BN, positions_BN, cells_BN))
    return TokenInputs(ids_T, next_T, positions_T, cells_T, table_BM, (starts_B + width).int())


def begin_round(
    tokens_SL: torch.Tensor,
    known_S: torch.Tensor,
    proposed_S: torch.Tensor,
    slots_B: torch.Tensor,
    starts_B: torch.Tensor,
    counts_B: torch.Tensor,
    drafts_KB: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [B] where each sequence's round begins, [B] how many drafts it has, and [B, K] what they are; write them
    behind the tokens that are known.

    Args:
        tokens_SL: int32. known_S, proposed_S: int64, known tokens of each slot and drafts behind them, as the round
            before left them. slots_B: int64. starts_B: int64, -1: where ``known_S`` says. counts_B: int64, of such
            sequences an upper bound. drafts_KB: int64, -1: what stands there.
    """
    left_B = starts_B < 0
    starts_B = torch.where(left_B, known_S[slots_B] - 1, starts_B)
    counts_B = torch.where(left_B, torch.minimum(counts_B, proposed_S[slots_B]), counts_B)
    places_BK = starts_B.unsqueeze(1) + 1 + torch.arange(len(drafts_KB), device=slots_B.device)
    owner_B1, drafts_BK = slots_B.unsqueeze(1), drafts_KB.t()
    drafts_BK = torch.where(drafts_BK < 0, tokens_SL[owner_B1, places_BK].long(), drafts_BK)
    tokens_SL[owner_B1, places_BK] = drafts_BK.int()
    return starts_B, counts_B, drafts_BK


def keep_tokens(
    tokens_SL: torch.Tensor,
    known_S: torch.Tensor,
    slots_B: torch.Tensor,
    starts_B: torch.Tensor,
    counts_B: torch.Tensor,
    drafts_BK: torch.Tensor,
    ids_BN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [B] how many drafts are what was sampled in their place, and [B] the token behind them; write it, and how
    many tokens are known then. Without drafts (K = 0) that is the one sampled token.

    Args:
        counts_B: int64, drafts of each sequence. ids_BN: int64, what was sampled behind each token.
    """
    width = drafts_BK.shape[1]
    place_K = torch.arange(width, device=slots_B.device)
    same_BK = (drafts_BK == ids_BN[:, :width]) & (place_K < counts_B.unsqueeze(1))
    kept_B = same_BK.long().cumprod(1).sum(1)
    last_B = ids_BN.gather(1, kept_B.unsqueeze(1)).squeeze(1)
    ends_B = starts_B + 1 + kept_B
    tokens_SL[slots_B, ends_B] = last_B.int()
    known_S[slots_B] = ends_B + 1
    return kept_B, last_B


def end_round(
    tokens_SL: torch.Tensor,
    proposed_S: torch.Tensor,
    slots_B: torch.Tensor,
    starts_B: torch.Tensor,
    kept_B: torch.Tensor,
    room_B: torch.Tensor,
    ids_BN: torch.Tensor,
    found_BK: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Return [B, N + K] int32, the tokens that a round gave and the drafts for the next, both -1 behind their last;
    write the drafts behind the tokens. They end before the first that is no token or has no room.

    Args:
        kept_B, ids_BN: as in :func:`keep_tokens`. room_B: int64, most drafts of each sequence. found_BK: int64.
    """
    width = found_BK.shape[1]
    place_K = torch.arange(width, device=slots_B.device)
    legal_BK = (found_BK >= 0) & (found_BK < vocab_size) & (place_K < room_B.unsqueeze(1))
    next_BK = torch.where(legal_BK.long().cumprod(1) > 0, found_BK, -1)
    owner_B1, places_BK = slots_B.unsqueeze(1), (starts_B + 2 + kept_B).unsqueeze(1) + place_K
    tokens_SL[owner_B1, places_BK] = torch.where(next_BK < 0, tokens_SL[owner_B1, places_BK], next_BK).int()
    proposed_S[slots_B] = (next_BK >= 0).sum(1)
    counted_BN = torch.arange(1 + width, device=slots_B.device) <= kept_B.unsqueeze(1)
    return torch.cat((torch.where(counted_BN, ids_BN, -1), next_BK), 1).int()
