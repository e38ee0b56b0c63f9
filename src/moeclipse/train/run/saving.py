"""When a run saves, and what becomes of it when it cannot.

    by steps    after every so many of them (`checkpoint.every = 50`)
    by time     when rank 0's clock says so, which all learn with the numbers of a step (`every = "auto"`)
    at the end  of the run, or of this job when it is asked to leave

A save that fails on one rank fails on all of them, with the same words (`checkpoints/save`). That is no
reason to stop: what was computed is not lost while the ranks live, and the next save may find room on the
disk. It is one when nothing can be saved any more: after MAX_FAILED in a row, or at the end. The run then
ends with the words of the first failure, which name the checkpoint that still stands.

Contract. Ranks decide from `signals`, one number of each rank that all of them have, so all decide alike.

The best checkpoint is that of the lowest loss on text that training does not read. `checkpoints/best.json`
says which step that is, and with which loss. Such a step is saved when it is found, and stays when newer
ones push older ones out (`checkpoints/folder`).

All ranks decide alike: the loss is the same on all of them, and what an earlier job found is told
by rank 0. The file is written once the checkpoint stands. A run that goes back before its best step forgets
it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CheckpointError, StorageError
from moeclipse.core.outside import read_json
from moeclipse.train.checkpoints.async_save import AsyncSave
from moeclipse.train.checkpoints.folder import BEST, best_step, step_name
from moeclipse.train.run.run_files import write_atomic
from moeclipse.train.run.survival_config import CheckpointConfig

MAX_FAILED = 3
ENDED, DUE, LEAVE, LEAVE_AT_SAVE = 1, 2, 4, 16  # what a rank tells the others with each step; 8: integrity


class Saving:
    def __init__(
        self,
        config: CheckpointConfig,
        save: Callable[[int, AsyncSave | None], Path],
        tell: Callable[[str], None],
        *,
        asked_to_leave: Callable[[], bool] = lambda: False,
        leave_at_save: Callable[[], bool] = lambda: False,
        make_ready: Callable[[AsyncSave], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.save, self.tell = config, save, tell
        self.asked_to_leave, self.make_ready, self.clock = asked_to_leave, make_ready, clock
        self.leave_at_save = leave_at_save
        self.async_save = AsyncSave()
        self.path: Path | None = None
        """The newest checkpoint that was saved."""
        self.begun, self.stall_s = 0, 0.0
        """Saves before the last one, and for how long training waited for them in all."""
        self._begun_at = clock()
        self._failed: list[str] = []

    def signals(self) -> int:
        """What this rank tells the others."""
        due = self.config.every == "auto" and self.clock() - self._begun_at >= 60 * self.config.minutes
        leave = LEAVE * self.asked_to_leave() | LEAVE_AT_SAVE * self.leave_at_save()
        return ENDED * self.async_save.ended | DUE * due | leave

    def is_due(self, done: int, signals: Sequence[int]) -> bool:
        """Whether the state after `done` steps is to be saved, from what rank 0 said."""
        if self.config.every == "auto":
            return bool(signals[0] & DUE) and not self.async_save.under_way
        return bool(self.config.every) and done % self.config.every == 0

    def after_step(self, done: int, signals: Sequence[int], *, last: bool, best: bool = False) -> None:
        """Whatever is due. Collective; `last`: this rank will save nothing after it.

        `best`: a state that must be saved now, and stand before the next step.
        """
        before = self.clock()
        if self.async_save.under_way and all(signal & ENDED for signal in signals):
            self._try(self.async_save.advance)
        if last:
            self.finish()
            if self.config.at_end or best or self.leaving(done, signals):
                self._try(lambda: self.save(done, None), last=True)
            return
        if best or self.is_due(done, signals):
            self.finish()
            self._begun_at, self.begun = before, self.begun + 1
            if self.config.asynchronous and not best:
                self._try(lambda: self.save(done, self.async_save) and None)
            else:
                self._try(lambda: self.save(done, None))
        elif self.config.asynchronous and self.begun == 0 and self._half_way(done):
            self.make_ready(self.async_save)
        self.stall_s += self.clock() - before

    def _half_way(self, done: int) -> bool:
        """To the first save: memory that is never used is not taken, and the save finds it ready."""
        if self.config.every == "auto":
            return self.clock() - self._begun_at >= 30 * self.config.minutes
        return bool(self.config.every) and 2 * done >= self.config.every

    def leaving(self, done: int, signals: Sequence[int]) -> bool:
        """Whether the job ends with this step, though the run does not."""
        at_save = any(signal & LEAVE_AT_SAVE for signal in signals) and self.is_due(done, signals)
        return at_save or any(signal & LEAVE for signal in signals)

    def finish(self) -> None:
        """Wait for the save that is under way. Collective."""
        self._try(self.async_save.finish)

    def _try(self, work: Callable[[], Path | None], *, last: bool = False) -> None:
        try:
            path = work()
        except CheckpointError as error:
            self._failed.append(str(error))
            if last or len(self._failed) >= MAX_FAILED:
                again = f"; nor could {len(self._failed) - 1} later ones" if len(self._failed) > 1 else ""
                raise StorageError(f"{self._failed[0]}{again}") from None
            self.tell(f"{error}; training goes on")
            return
        if path is not None:
            self.path = path
            self._failed.clear()


class BestCheckpoint:
    def __init__(self, folder: Path, mesh: Mesh, start: int) -> None:
        """`start`: the step that the run begins with. Collective."""
        self.folder, self.mesh = folder, mesh
        known = mesh.gather_objects(read_best(folder) if mesh.rank == 0 else None)[0]
        self.step, self.loss = -1, math.inf
        if known is not None and known[0] <= start:
            self.step, self.loss = known

    def is_better(self, loss: float) -> bool:
        return loss < self.loss  # never of NaN

    def keep(self, path: Path | None, step: int, loss: float) -> None:
        """After a save: `step` is the best one, if its checkpoint stands."""
        if path is None or path.name != step_name(step):
            return
        self.step, self.loss = step, loss
        if self.mesh.rank == 0:
            write_atomic(self.folder / BEST, json.dumps({"step": step, "eval_loss": loss}) + "\n")

    def told(self) -> dict[str, object]:
        """For the summary."""
        return {"best_eval_loss": self.loss, "best_step": self.step} if self.step >= 0 else {}


def read_best(folder: Path) -> tuple[int, float] | None:
    """(step, loss) of what an earlier job found, if the checkpoint is still there."""
    step = best_step(folder)
    if step is None or not (folder / step_name(step)).is_dir():
        return None
    try:
        loss = read_json(folder / BEST)["eval_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (step, loss) if type(loss) is float and math.isfinite(loss) else None
