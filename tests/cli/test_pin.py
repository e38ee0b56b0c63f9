"""Cores for ranks: neighbours, none shared, and none where there are too few."""

from __future__ import annotations

import os

import pytest

from moeclipse.cli.pin import cores_for, pin_rank


@pytest.mark.parametrize(
    ("num_ranks", "cores", "expected"),
    [
        (2, {0, 1}, [{0}, {1}]),
        (2, {3, 5, 8, 9, 11}, [{3, 5}, {8, 9}]),
        (3, {0, 1}, [None] * 3),
        (1, {0, 1, 2}, [None]),
    ],
)
def test_each_rank_has_its_own(num_ranks: int, cores: set[int], expected: list) -> None:
    assert [cores_for(place, num_ranks, cores) for place in range(num_ranks)] == expected


def test_a_quota_leaves_ranks_where_they_are() -> None:
    before = os.sched_getaffinity(0)
    assert pin_rank({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, usable=0) is None
    assert os.sched_getaffinity(0) == before


def test_a_quota_that_all_ranks_fit_into_is_a_quota_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("pinned"))
    assert pin_rank({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, usable=4) is None


def test_a_rank_keeps_to_its_cores() -> None:
    child = os.fork()
    if child == 0:
        cores = os.sched_getaffinity(0)
        mine = pin_rank({"LOCAL_WORLD_SIZE": str(len(cores)), "LOCAL_RANK": "0"}, usable=len(cores))
        right = len(cores) < 2 or mine == {min(cores)} == os.sched_getaffinity(0)
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
