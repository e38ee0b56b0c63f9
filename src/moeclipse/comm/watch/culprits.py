"""Who is to blame for a wait: the ranks that others wait for, and that wait for nobody.

A rank that waits in a collective waits for those of its members that are not in the same one. Followed from
the rank that waited too long, this leads to ranks that gave no sign (frozen, or gone), to ranks whose host is
busy elsewhere, or back to itself: then ranks wait in different collectives, or all in one, and the network is
to blame. Whose, those say that cannot be reached (`reach`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NAMED = 4  # ranks in one message; of a thousand that wait for one, nobody needs the list


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Where a rank is, as it says itself."""

    waits: bool
    """In `op`; else it computes, behind `op`."""
    op: str = ""
    lane: str = ""
    since_s: float = 0.0
    ranks: tuple[int, ...] = ()
    """Who takes part in `op`."""
    host: str = ""
    address: str = ""
    """By which other ranks reach it."""

    def record(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Stand:
        return cls(**{**record, "ranks": tuple(record["ranks"])})


def reached_from(rank: int, stands: Mapping[int, Stand]) -> list[int]:
    """The ranks that `rank` waits for, and those that these wait for, and so on; nearest first, sorted."""
    reached: list[int] = []
    frontier = [rank]
    while frontier:
        found: set[int] = set()
        for waiting in frontier:
            stand = stands[waiting]
            found |= {
                other
                for other in stand.ranks
                if stand.waits
                and not (other in stands and stands[other].waits and stands[other].op == stand.op)
            }
        frontier = sorted(found - {rank, *reached})
        reached += frontier
        frontier = [other for other in frontier if other in stands]
    return reached


def all_wait(rank: int, stands: Mapping[int, Stand]) -> bool:
    """Whether every rank that `rank` waits for is there and waits, too: it is the network, or the order."""
    return all(other in stands and stands[other].waits for other in reached_from(rank, stands))


def describe_cut(cut_off: Collection[int], stands: Mapping[int, Stand]) -> str:
    """Whose network is cut, where one rank does not reach some; others are taken to reach each other."""
    hosts = {stand.host for stand in stands.values()}
    near = sorted(set(stands) - set(cut_off))
    far = sorted(set(stands) & set(cut_off))
    if len(near) == len(far):
        both = f"{named_ranks(near)} and {named_ranks(far)}"
        return f"{both} do not reach each other: the network between them is cut"
    fewer = min(near, far, key=len)
    where = "".join(dict.fromkeys(_on(stands[other], hosts) for other in fewer))
    return f"{named_ranks(fewer)}{where} cannot be reached by the others: the network there is cut"


def named_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    head = "rank" if len(ranks) == 1 else "ranks"
    return f"{head} {', '.join(map(str, ranks[:NAMED]))}{more}"


def describe_wait(rank: int, stands: Mapping[int, Stand]) -> str:
    """Why `rank` waits, in words."""
    reached = reached_from(rank, stands)
    silent = [other for other in reached if other not in stands]
    busy = [other for other in reached if other in stands and not stands[other].waits]
    hosts = {stand.host for stand in stands.values()}
    parts = [f"rank {other} did not arrive" for other in silent]
    for other in busy:
        stand = stands[other]
        behind = f" (it is {stand.since_s:.3g} s behind {stand.op})" if stand.op else ""
        parts.append(f"rank {other}{_on(stand, hosts)} did not arrive{behind}")
    if not parts:
        parts = [f"rank {other}{_on(stands[other], hosts)} waits in {stands[other].op}" for other in reached]
    if not parts:
        return "all ranks arrived, so the network stalled"
    more = f"; and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return "; ".join(parts[:NAMED]) + more


def _on(stand: Stand, hosts: set[str]) -> str:
    return f" on {stand.host}" if stand.host and len(hosts) > 1 else ""
