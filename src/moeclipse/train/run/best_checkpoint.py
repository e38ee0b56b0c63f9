"""The best checkpoint of a run, by its loss on text that training does not read.

`checkpoints/best.json` says which step that is, and with which loss. Such a step is saved when it is found,
and stays when newer ones push older ones out (`checkpoints/folder`).

Contract. All ranks decide alike: the loss is the same on all of them, and what an earlier job found is told
by rank 0. The file is written once the checkpoint stands. A run that goes back before its best step forgets
it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from moeclipse.comm.mesh import Mesh
from moeclipse.core.outside import read_json
from moeclipse.train.checkpoints.folder import BEST, best_step, step_name
from moeclipse.train.run.run_files import write_atomic


class BestCheckpoint:
    def __init__(self, folder: Path, mesh: Mesh, start: int) -> None:
        """`start`: the step that the run begins with. Collective."""
        self.folder, self.mesh = folder, mesh
        known = mesh.gather_objects(read_best(folder) if mesh.rank == 0 else None)[0]
        self.step, self.loss = -1, math.inf
        if known is not None and known["step"] <= start:
            self.step, self.loss = known["step"], known["eval_loss"]

    def is_better(self, loss: float) -> bool:
        return loss < self.loss  # never of NaN

    def keep(self, path: Path | None, step: int, loss: float) -> None:
        """After a save: `step` is the best one, if its checkpoint stands."""
        if path is None or path.name != step_name(step):
            return
        self.step, self.loss = step, loss
        if self.mesh.rank == 0:
            write_atomic(self.folder / BEST, json.dumps({"step": step, "eval_loss": loss}) + "\n")

    def told(self) -> dict[str, Any]:
        """For the summary."""
        return {"best_eval_loss": self.loss, "best_step": self.step} if self.step >= 0 else {}


def read_best(folder: Path) -> dict[str, Any] | None:
    """What an earlier job found, if the checkpoint is still there."""
    step = best_step(folder)
    if step is None or not (folder / step_name(step)).is_dir():
        return None
    try:
        loss = read_json(folder / BEST)["eval_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {"step": step, "eval_loss": loss} if type(loss) is float and math.isfinite(loss) else None
