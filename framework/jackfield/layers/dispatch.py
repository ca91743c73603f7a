"""Dispatchers: which rank has which experts, and how tokens get there and back. Legend: T tokens, N rows of this rank,
S chosen, X experts of all ranks, R ranks, E width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from jackfield.errors import ConfigError
from jackfield.interfaces import Communicator, RankInfo
from jackfield.interfaces.moe import Dispatched

PLACEMENTS = ("linear", "round_robin")


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank has which experts.

    Args:
        num_experts: X. rank: this rank, and how many there are. kind: ``linear``: neighbours are together; the first
            ranks have one more where the number does not divide. ``round_robin``: dealt out one by one.
    """

    num_experts: int
    rank: RankInfo = field(default_factory=RankInfo)
    kind: str = "linear"

    def __post_init__(self) -> None:
        if self.kind not in PLACEMENTS:
            raise ConfigError(
                "experts cannot be placed so", field="placement", value=self.kind, remedy="use linear or round_robin"
            )

    def owners(self) -> list[int]:
        """Return the rank of each expert."""
        size = self.rank.size
        if self.kind == "round_robin":
            return [expert % size for expert in range(self.num_experts)]
        share, more = divmod(self.num_experts, size)
        return [rank for rank in range(size) for _ in range(share + (rank < more))]

    def places(self) -> list[int]:
        """Return the place of each expert among those of its rank."""
        seen = [0] * self.rank.size
        found = []
        for owner in self.owners():
            found.append(seen[owner])
            seen[owner] += 1
        return found

    def held(self) -> dict[int, int]:
        """Return the place of each expert of this rank."""
        pairs = enumerate(zip(self.owners(), self.places(), strict=True))
        return {expert: place for expert, (owner, place) in pairs if owner == self.rank.rank}


class LocalDispatcher:
    """All experts are here."""

    partial = False

    def prepare(self, x_TE: torch.Tensor, weights_TS: torch.Tensor, experts_TS: torch.Tensor) -> Dispatched:
        """Return all tokens."""
        return Dispatched(x_TE, weights_TS, experts_TS)

    def finalize(self, out_NE: torch.Tensor, rows: Dispatched) -> torch.Tensor:
        """Return the results as they are."""
        return out_NE


class MaskedDispatcher:
    """Every rank has all tokens and some of the experts; results are added over ranks."""

    partial = True

    def __init__(self, placement: Placement, communicator: Communicator, device: torch.device) -> None:
        held = placement.held()
        self._local_X = torch.tensor([held.get(e, -1) for e in range(placement.num_experts)], device=device)
        self._communicator = communicator

    def prepare(self, x_TE: torch.Tensor, weights_TS: torch.Tensor, experts_TS: torch.Tensor) -> Dispatched:
        """Return all tokens; experts of other ranks become -1."""
        return Dispatched(x_TE, weights_TS, self._local_X[experts_TS])

    def finalize(self, out_NE: torch.Tensor, rows: Dispatched) -> torch.Tensor:
        """Return the sum over ranks."""
        return self._communicator.all_reduce(out_NE)


@dataclass(frozen=True, slots=True)
class _Trip:
    """Where rows came from: tokens [M] that this rank sent, in the order of ranks; rows sent to and got from each."""

    tokens: torch.Tensor
    sent: list[int]
    got: list[int]
    count: int


class AllToAllDispatcher:
    """Every rank has tokens of its own and some of the experts. A token travels once to each rank that has one of its
    experts.

    Args:
        placement: of experts. device: of tokens. group: of ``torch.distributed``; None is the default group.
    """

    partial = True

    def __init__(self, placement: Placement, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._owner_X = torch.tensor(placement.owners(), device=device)
        self._place_X = torch.tensor(placement.places(), device=device)
        self._size, self._group = placement.rank.size, group

    def prepare(self, x_TE: torch.Tensor, weights_TS: torch.Tensor, experts_TS: torch.Tensor) -> Dispatched:
        """Send tokens to experts; ranks may have any number of them, and none."""
        owner_TS, place_TS = self._owner_X[experts_TS], self._place_X[experts_TS]
        theirs = [(owner_TS == rank).any(1).nonzero().flatten() for rank in range(self._size)]
        places = [place_TS[tokens].masked_fill(owner_TS[tokens] != rank, -1) for rank, tokens in enumerate(theirs)]
        tokens, sent = torch.cat(theirs), [len(part) for part in theirs]
        got = self._exchange(torch.tensor(sent, device=x_TE.device), [1] * self._size, [1] * self._size).tolist()
        parts = (x_TE[tokens], weights_TS[tokens], torch.cat(places))
        x_NE, weights_NS, experts_NS = (self._exchange(part, sent, got) for part in parts)
        return Dispatched(x_NE, weights_NS, experts_NS, _Trip(tokens, sent, got, len(x_TE)))

    def finalize(self, out_NE: torch.Tensor, rows: Dispatched) -> torch.Tensor:
        """Send results back and add them, rank by rank."""
        trip: _Trip = rows.state
        back_ME = self._exchange(out_NE, trip.got, trip.sent)
        return back_ME.new_zeros((trip.count, out_NE.shape[1])).index_add_(0, trip.tokens, back_ME)

    def _exchange(self, rows: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        out = rows.new_empty((sum(got), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), got, sent, group=self._group)
        return out
