"""What saving needs of other ranks: all do their part, or all know that one of them could not."""

from __future__ import annotations

from typing import Any

import pytest

from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.ranks import OneRank, PatientRanks, RanksFailed, together


def agreed(mesh: Mesh, victims: list[int]) -> Any:
    def work() -> int:
        if mesh.rank in victims:
            raise OSError("" if mesh.rank == 2 else f"disk {mesh.rank} is gone")
        return 10 * mesh.rank

    ranks = PatientRanks(mesh, 20.0)
    assert (ranks.rank, ranks.num_ranks) == (mesh.rank, mesh.num_ranks)
    try:
        return together(ranks, work)
    except RanksFailed as error:
        return str(error)


def test_results_of_all_ranks_in_their_order() -> None:
    assert run_ranks(3, agreed, []) == [[0, 10, 20]] * 3


def test_the_failure_of_some_is_known_to_all() -> None:
    told = "rank 1: disk 1 is gone; rank 2: OSError('')"
    assert run_ranks(3, agreed, [1, 2]) == [told] * 3


def test_patience_is_passed_on() -> None:
    class Recorder:
        rank, num_ranks = 3, 5

        def gather_objects(self, obj: Any, patience_s: float) -> list[Any]:
            return [obj, patience_s]

    ranks = PatientRanks(Recorder(), 7.5)  # type: ignore[arg-type]
    assert (ranks.rank, ranks.num_ranks, ranks.gather_objects("x")) == (3, 5, ["x", 7.5])


def test_one_rank_alone_agrees_with_itself() -> None:
    alone = OneRank()
    assert (alone.rank, alone.num_ranks) == (0, 1)
    assert together(alone, lambda: {"bytes": 3}) == [{"bytes": 3}]

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(RanksFailed, match="rank 0: in words: no"):
        together(alone, fails, lambda error: f"in words: {error}")
