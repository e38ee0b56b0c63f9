"""Signs of life, for waits in which a peer may be late by half an hour but not gone.

Beside a disk a rank may be busy for long, so who waits for it there has more patience than the deadline. A
host that is lost meanwhile says nothing: its connections stay open until the patience ends. So the talking
thread of every rank (`comm/watch/watchdog`), which no disk holds up, counts in the store, and who waits with
patience looks whether the others' counts go on. One that stands still for the whole deadline is gone.

Contract. Words that no rank has signed say nothing of a rank: they begin its time anew.
"""

from __future__ import annotations

from contextlib import suppress

from moeclipse.comm.failure import Watch
from moeclipse.comm.watch.op_log import LoggedOp

OFTEN = 4
"""Signs within a deadline."""


class Beats:
    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._count, self._signed = 0, float("-inf")
        self._seen: dict[int, tuple[int | None, float]] = {}
        """Rank -> its count, and since when it stands there."""
        self._looked = float("-inf")

    def sign(self, now: float) -> None:
        if now - self._signed >= self.watch.deadline_s / OFTEN:
            self._count, self._signed = self._count + 1, now
            self.watch.say(f"beat/{self.watch.rank}", self._count)

    def lost(self, op: LoggedOp | None, now: float) -> list[int]:
        """Ranks of an op that is waited for with patience whose counts stood still for the deadline."""
        if op is None:
            self._seen.clear()
            return []
        if now - self._looked >= self.watch.deadline_s / OFTEN:
            self._looked = now
            for rank in op.ranks:
                self._look(rank, now)
        late = [rank for rank, (_, since) in self._seen.items() if now - since > self.watch.deadline_s]
        return sorted(set(late) & set(op.ranks) - {self.watch.rank})

    def _look(self, rank: int, now: float) -> None:
        found = None
        with suppress(TypeError, ValueError):
            found = int(str(self.watch.hear(f"beat/{rank}")))
        count, since = self._seen.get(rank, (None, now))
        stands = found is not None and found == count
        self._seen[rank] = (found, since if stands else now)


def describe_lost(rank: int, op: LoggedOp, lost: list[int], deadline_s: float) -> str:
    who = " and ".join(f"rank {one}" for one in lost)
    verb = "has" if len(lost) == 1 else "have"
    return (
        f"rank {rank} waited in {op.label}: {who} {verb} given no sign of life for {deadline_s:g} s; "
        "the host or its network is gone, or the process stands still"
    )
