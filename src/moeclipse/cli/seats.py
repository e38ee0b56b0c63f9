"""Seats: where ranks of this host run, some of which may be lost for good (`--ranks 2:4`).

A seat has room for one rank: a device, or on CPU a process. It is given up when the rank on it

    fails and no restart is left,
    was started again after a failure of its own and failed before its first step,
    met the same fault in the same step for the third time,

and the run goes on with those that are left: with the largest number of ranks that a layout fits
(`train/elastic`), from the newest checkpoint. That takes none of the restarts. Who left no word of its own is
not to be told from its victims; then nobody is given up.

After a save, seats that were given up are asked again: a process does there what a rank does first. Once
enough answer for a larger layout, ranks leave at the save that comes next and start again with them. A seat
that is lost once more is asked after twice as many saves, so a device that comes and goes costs little.

Hazard. A process that asks must not be a child of the launcher: ranks count these, to hear whether one was
lost (`cli/signals`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moeclipse.cli.failures import Failure
from moeclipse.core.outside import read_text
from moeclipse.train.elastic import largest

SEATS = "MOECLIPSE_SEATS"
"""Of this host's ranks, in the order of their local ranks."""
ROOM = "MOECLIPSE_ROOM"
"""A file: once it is there, ranks leave at their next save, because more can start."""
DEVICES = "CUDA_VISIBLE_DEVICES"
LOOK_S = 0.5
ASK_S = 120
"""How long a seat may take to answer."""
ASK = '{ "$@" && echo yes >"$0.new" || echo no >"$0.new"; mv "$0.new" "$0"; } >/dev/null 2>&1 </dev/null &'


class Seats:
    def __init__(
        self,
        numbers: Sequence[int],
        folder: Path,
        checkpoints: Path,
        *,
        cuda: bool,
        settle: Callable[[int], None],
    ) -> None:
        """`numbers` of ranks that are possible; `settle` writes the configuration for one of them.

        `folder` is the launcher's own, `checkpoints` where the run saves.
        """
        self.numbers, self.folder, self.checkpoints, self.cuda = numbers, folder, checkpoints, cuda
        self.settle = settle
        self.given_up: dict[int, int] = {}
        """Seat -> saves until it is asked again."""
        self.returned: set[int] = set()
        """Seats that were given up and that the present attempt tries again."""
        self._lost: dict[int, int] = {}
        """Seat -> how often it was given up."""
        self._failed = -1
        """The seat whose rank made the attempt before fail."""
        self._looked, self._seen = 0.0, ""
        self._asking: set[int] = set()
        self._answered: set[int] = set()
        self._devices = [name for name in os.environ.get(DEVICES, "").split(",") if name]
        self.taken: list[int] = []
        self._sit(max(numbers))

    def _sit(self, num_ranks: int) -> None:
        everyone = range(max(self.numbers))
        self.taken = [seat for seat in everyone if seat not in self.given_up][:num_ranks]
        self.room.unlink(missing_ok=True)
        os.environ |= {SEATS: ",".join(map(str, self.taken)), ROOM: str(self.room)}
        if self.cuda:
            os.environ[DEVICES] = ",".join(self._device(seat) for seat in self.taken)
        self.settle(num_ranks)
        self._seen = self._newest()

    def _device(self, seat: int) -> str:
        return self._devices[seat] if self._devices else str(seat)

    @property
    def room(self) -> Path:
        return self.folder / "room"

    @property
    def num_ranks(self) -> int:
        return len(self.taken)

    # --- fewer -------------------------------------------------------------------------------------------

    def lose(self, rank: int | None, *, began: bool, last: bool, recurs: bool) -> tuple[int, str] | None:
        """Give up the seat of a rank that failed, if it is lost for good: the seat, and why.

        `began`: a step was begun; `last`: no restart is left; `recurs`: the same fault again and again.
        """
        before, self._failed = self._failed, -1 if rank is None else self.taken[rank]
        if rank is None:
            return None
        seat = self.taken[rank]
        again = not began and (seat == before or seat in self.returned)
        if not (last or recurs or again) or not self._left_without(seat):
            return None
        if again:
            why = "it was started again and failed before its first step"
        else:
            why = "a restart does not help" if recurs else "no restart is left"
        self._lost[seat] = self._lost.get(seat, 0) + 1
        self.given_up[seat] = 2 ** (self._lost[seat] - 1)
        self._failed = -1
        self.returned.clear()
        self._sit(self._left_without(seat))
        return seat, why

    def _left_without(self, seat: int) -> int:
        return largest(self.numbers, max(self.numbers) - len({*self.given_up, seat}))

    # --- more --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Called often while ranks work: ask for seats after saves, and make room once enough answer."""
        if not self.given_up or time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        if (newest := self._newest()) != self._seen:
            self._seen = newest
            for seat in set(self.given_up) - {*self._asking, *self._answered}:
                self.given_up[seat] -= 1
                if self.given_up[seat] <= 0:
                    self._ask(seat)
        for seat in [*self._asking]:
            answer = self._answer(seat)
            if not answer.exists():
                continue
            self._asking.remove(seat)
            if read_text(answer) == "yes\n":
                self._answered.add(seat)
            else:
                self.given_up[seat] = 2 ** (self._lost[seat] - 1)
        if self._answered and self._with_answered() > self.num_ranks:
            self.room.touch()

    def _with_answered(self) -> int:
        return largest(self.numbers, max(self.numbers) - len(self.given_up) + len(self._answered))

    def take_back(self) -> list[int]:
        """Ranks have left to make room: sit on what answered. The seats that are new."""
        before = set(self.taken)
        for seat in self._answered:
            del self.given_up[seat]
        self.returned, self._answered = set(self._answered), set()
        self._sit(largest(self.numbers, max(self.numbers) - len(self.given_up)))
        return sorted(set(self.taken) - before)

    def _newest(self) -> str:
        try:
            return max(
                (name for name in os.listdir(self.checkpoints) if name.startswith("step-")), default=""
            )
        except OSError:
            return ""

    def _answer(self, seat: int) -> Path:
        return self.folder / f"seat-{seat}"

    def _ask(self, seat: int) -> None:
        self._asking.add(seat)
        self._answer(seat).unlink(missing_ok=True)
        words = [sys.executable, "-m", "moeclipse.cli.ask_seat", str(ASK_S), str(int(self.cuda))]
        environment = os.environ | {SEATS: str(seat)}
        if self.cuda:
            environment[DEVICES] = self._device(seat)
        # The shell ends at once, and who asks is nobody's child.
        subprocess.run(["sh", "-c", ASK, str(self._answer(seat)), *words], env=environment, check=False)


def culprit(failure: Failure, written: Sequence[Failure], num_ranks: int) -> int | None:
    """The rank that failed by itself; None where that cannot be known."""
    if not failure.victim and not failure.late:
        return failure.rank
    silent = set(range(num_ranks)) - {one.rank for one in written}
    return silent.pop() if len(silent) == 1 else None
