"""In which order a rank fills the replicas of each expert with its rows: its own one first.

Computed once for a placement and a rank; what changes from step to step are the quotas (`balance/split`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeclipse.balance.placement import Placement


@dataclass(frozen=True)
class QuotaOrder:
    """The slots that hold experts, expert by expert; those of expert e begin at first_E[e]."""

    slots_R: np.ndarray
    first_E: np.ndarray

    @classmethod
    def of(cls, placement: Placement, me: int) -> QuotaOrder:
        places: list[list[tuple[bool, int]]] = [[] for _ in range(placement.num_experts)]
        slot = 0
        for rank, row in enumerate(placement.slots):
            for expert in row:
                if expert >= 0:
                    places[expert].append((rank != me, slot))
                slot += 1
        slots = [slot for found in places for _, slot in sorted(found)]
        first = np.cumsum([0, *map(len, places)])
        return cls(np.array(slots, dtype=np.int64), first)
