"""The best checkpoint: found again, kept when others go, and forgotten where it is no longer there."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from moeclipse.comm.mesh import Mesh
from moeclipse.train.checkpoints.disk import DISK
from moeclipse.train.checkpoints.folder import BEST, best_step, checkpoints_in, prune, step_name
from moeclipse.train.run.saving import BestCheckpoint, read_best


def made(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / step_name(step)).mkdir(parents=True)


def test_it_outlives_newer_ones(tmp_path: Path) -> None:
    mesh = Mesh.single()
    best = BestCheckpoint(tmp_path, mesh, 0)
    assert best.told() == {}
    made(tmp_path, 10, 20)
    assert best.is_better(2.0)
    best.keep(tmp_path / step_name(10), 10, 2.0)
    assert not best.is_better(2.0)
    assert not best.is_better(math.nan)
    best.keep(tmp_path / step_name(10), 20, 1.0)  # that save failed
    best.keep(None, 20, 1.0)
    assert best.told() == {"best_eval_loss": 2.0, "best_step": 10}
    made(tmp_path, 30)
    prune(DISK, tmp_path, 30, 1)
    assert [entry.step for entry in checkpoints_in(tmp_path)] == [30, 10]
    again = BestCheckpoint(tmp_path, mesh, 30)
    assert (again.step, again.loss) == (10, 2.0)
    assert BestCheckpoint(tmp_path, mesh, 5).step == -1, "the run went back before it"
    again.keep(tmp_path / step_name(30), 30, 1.5)
    made(tmp_path, 40)
    prune(DISK, tmp_path, 40, 1)
    assert [entry.step for entry in checkpoints_in(tmp_path)] == [40, 30]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"step": "1"}', '{"step": 10}', '{"step": 10, "eval_loss": NaN}']
)
def test_a_file_that_says_nothing(tmp_path: Path, text: str) -> None:
    made(tmp_path, 10)
    (tmp_path / BEST).write_text(text)
    assert read_best(tmp_path) is None
    assert best_step(tmp_path) in (None, 10)


def test_a_checkpoint_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / BEST).write_text(json.dumps({"step": 10, "eval_loss": 2.0}))
    assert read_best(tmp_path) is None
    made(tmp_path, 10)
    assert read_best(tmp_path) == (10, 2.0)
