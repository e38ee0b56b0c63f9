"""What travels from one placement to the next, rank by rank.

Idea: a migration is over when the busiest rank has sent and received what it has to, so it is that rank's
copies that cost time, not those of all. Parameters go to ranks that are new to an expert, at even parts from
those that held it: all replicas are equal, and none has to send them all. Optimizer state goes from owners
to owners, by what both own (`balance/ownership`): r ranks of an expert own even parts of it, in their order.

Contract: pure. Copies, and parts of them, in units of one expert; `balance/objective` knows their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moeclipse.balance.placement import Placement


@dataclass(frozen=True, slots=True)
class RankMoves:
    """Of one rank: copies of parameters and parts of optimizer state, in each direction."""

    rank: int
    weights_in: float = 0.0
    weights_out: float = 0.0
    states_in: float = 0.0
    states_out: float = 0.0

    def __add__(self, other: RankMoves) -> RankMoves:
        return RankMoves(
            self.rank,
            self.weights_in + other.weights_in,
            self.weights_out + other.weights_out,
            self.states_in + other.states_in,
            self.states_out + other.states_out,
        )


def moved(old: Placement, new: Placement, shared_owners: bool = True) -> tuple[RankMoves, ...]:
    """What each rank sends and receives for `new` to hold."""
    found = [RankMoves(rank) for rank in range(new.num_ranks)]
    pairs = zip(old.holders, new.holders, old.primary, new.primary, strict=True)
    for before, after, first, primary in pairs:
        for move in expert_moves(before, after, None if shared_owners else (first, primary)):
            found[move.rank] += move
    return tuple(found)


@lru_cache(maxsize=2**16)
def expert_moves(
    old: tuple[int, ...], new: tuple[int, ...], owner: tuple[int, int] | None = None
) -> tuple[RankMoves, ...]:
    """Of one expert whose ranks become others; `owner`: before and after, where one rank owns all of it."""
    if old == new and (owner is None or owner[0] == owner[1]):
        return ()
    arriving = sum(rank not in old for rank in new) / len(old)
    found = []
    for rank in sorted({*old, *new}):
        if owner is None:
            here, there = _part(rank, old), _part(rank, new)
        else:
            here, there = ((0.0, float(rank == one)) for one in owner)
        kept = max(min(here[1], there[1]) - max(here[0], there[0]), 0.0)
        found.append(
            RankMoves(
                rank,
                float(rank in new and rank not in old),
                arriving if rank in old else 0.0,
                there[1] - there[0] - kept,
                here[1] - here[0] - kept,
            )
        )
    return tuple(found)


def _part(rank: int, ranks: tuple[int, ...]) -> tuple[float, float]:
    """Where the part of an expert begins and ends that a rank owns; nothing if it is none of its ranks."""
    if rank not in ranks:
        return 0.0, 0.0
    place = ranks.index(rank)
    return place / len(ranks), (place + 1) / len(ranks)
