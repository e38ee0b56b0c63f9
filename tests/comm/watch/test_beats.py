"""A patient wait ends where a rank has gone, and only there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.watch.beats import Beats, describe_lost
from moeclipse.comm.watch.op_log import LoggedOp
from moeclipse.comm.watch.watchdog import Watchdog
from moeclipse.core.errors import CommError, DeadlineError
from moeclipse.testing.run_ranks import run_ranks

PATIENCE_S = 100.0


class Words:
    """A store, as a rank's watch uses it."""

    rank, deadline_s = 0, 8.0

    def __init__(self) -> None:
        self.found: dict[str, object] = {}

    def say(self, key: str, value: object) -> None:
        self.found[key] = value

    def hear(self, key: str) -> object:
        return self.found.get(key)


def test_a_count_that_stands_still_for_the_deadline_is_a_rank_that_is_gone() -> None:
    words = Words()
    beats = Beats(words)  # type: ignore[arg-type]
    op = LoggedOp(number=0, lane="grads", label="exchange of control data", ranks=(0, 1, 2, 3), launched=0.0)
    for now in range(30):
        beats.sign(now)
        words.found |= {"beat/1": now, "beat/2": min(now, 4)}  # 3 never said a word
        if now in (8, 9):
            words.found["beat/2"] = None  # nobody's words
        assert beats.lost(op, now) == ([2] if now >= 19 else []), now
    assert words.found["beat/0"] == 15, "every quarter of the deadline"
    assert beats.lost(None, 30) == []
    assert beats.lost(op, 31) == [], "a new wait begins anew"
    assert describe_lost(0, op, [2], 8.0).startswith(
        "rank 0 waited in exchange of control data: rank 2 has given no sign of life for 8 s"
    )
    assert "rank 2 and rank 3 have given" in describe_lost(0, op, [2, 3], 8.0)


def waits(mesh: Mesh, how: str, folder: Path) -> tuple[list[int], list[str]]:
    """Rank 2 comes late to an exchange: alive, or without a sign until the others have given it up."""
    causes: list[str] = []

    def lost(error: CommError) -> None:
        assert isinstance(error, DeadlineError)
        causes.append(str(error))
        (folder / f"given-up-{mesh.rank}").touch()

    mesh.barrier()
    with Watchdog(mesh.watch, lost=lost):
        if mesh.rank == 2:
            time.sleep(5.0 if how == "busy" else 1.0)
        if mesh.rank != 2 or how == "busy":
            return mesh.gather_objects(mesh.rank, PATIENCE_S), causes[:1]
    until = time.monotonic() + PATIENCE_S / 2
    while len([*folder.iterdir()]) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    return mesh.gather_objects(mesh.rank, PATIENCE_S), causes


@pytest.mark.parametrize("how", ["busy", "gone"])
def test_who_is_busy_is_waited_for_and_who_is_gone_is_not(how: str, tmp_path: Path) -> None:
    found = run_ranks(3, waits, how, tmp_path, collective_deadline_s=1.0)
    assert [everyone for everyone, _ in found] == [[0, 1, 2]] * 3
    told = [causes for _, causes in found]
    if how == "busy":
        assert told == [[], [], []]
    else:
        assert told[0] == told[1] != []
        assert "rank 2 has given no sign of life for 1 s" in told[0][0]
