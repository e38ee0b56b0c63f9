"""Ranks find each other in a store that is full of what earlier starts have left."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from moeclipse.comm.meet import meet
from moeclipse.core.errors import CommError

PATIENCE = timedelta(seconds=20)


def together(store: dist.Store, num_ranks: int, order: list[int]) -> dict[int, str]:
    """What ranks call this start, that come in this order."""
    found: dict[int, str] = {}
    threads = []
    for rank in order:

        def come(rank: int = rank) -> None:
            found[rank] = meet(store, rank, num_ranks, PATIENCE)

        threads.append(threading.Thread(target=come, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    return found


def test_every_start_has_a_name_of_its_own_whoever_was_there_before() -> None:
    store = dist.HashStore()
    names = []
    # Two, then three with one that was never there, then two again, then another rank 0: nobody counts.
    for num_ranks, order in ((2, [0, 1]), (3, [2, 0, 1]), (2, [1, 0]), (3, [1, 2, 0])):
        found = together(store, num_ranks, order)
        assert sorted(found) == list(range(num_ranks))
        assert len(set(found.values())) == 1
        names.append(found[0])
    assert len(set(names)) == 4


def test_words_of_the_dead_are_answered_and_the_living_still_heard() -> None:
    store = dist.HashStore()
    store.set("here/1", "of a rank that was killed while it waited")
    found = together(store, 2, [0, 1])
    assert found[0] == found[1]


def test_who_does_not_start_is_named() -> None:
    soon = timedelta(seconds=0.2)
    with pytest.raises(CommError, match=r"rank 0 waited 0\.2 s for rank 1, 2, which did not start"):
        meet(dist.HashStore(), 0, 3, soon)
    with pytest.raises(CommError, match=r"rank 1 waited 0\.2 s for rank 0, which did not start"):
        meet(dist.HashStore(), 1, 3, soon)
