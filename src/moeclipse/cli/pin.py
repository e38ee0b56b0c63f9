"""Cores for ranks: each rank of a machine keeps to its own, where there are enough of them.

Ranks that wake each other are otherwise drawn to the same core by the scheduler, where they take turns: with
busy neighbours an all-reduce of 64 KB through shared memory took 115 us, and 50 us with pinned ranks. All
threads of a rank share its cores, gloo's too. `parallel.pin = "off"` leaves placement to the system.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping


def cores_for(place: int, num_ranks: int, cores: Collection[int]) -> set[int] | None:
    """Neighbouring cores for the rank at this place; None where there are fewer cores than ranks."""
    share = len(cores) // num_ranks
    if num_ranks < 2 or share < 1:
        return None
    return set(sorted(cores)[place * share : (place + 1) * share])


def pin_rank(environment: Mapping[str, str], usable: int) -> set[int] | None:
    """Keep this process, a rank that a launcher started, to its cores; `usable`: what a quota leaves."""
    num_ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    cores = os.sched_getaffinity(0)
    if usable < len(cores):
        return None  # a quota counts time on any core: pinned ranks could not use what others leave
    mine = cores_for(int(environment.get("LOCAL_RANK", "0")), num_ranks, cores)
    if mine is not None:
        os.sched_setaffinity(0, mine)
    return mine
