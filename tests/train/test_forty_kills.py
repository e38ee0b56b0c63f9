"""Forty kills over layouts that keep state in different places: all runs end with the bits of the whole one.

A rank is killed by SIGKILL at the n-th op that it launches (exchanges, reductions, migrations, words), or at
the n-th thing it does to the disk while a save is written beside training; n and the rank are drawn. The run
goes on with `--resume auto`. Compared are all losses and the bytes of the last checkpoint's tensors.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_trainer import configure, losses

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.watch.op_log import LoggedOp, OpLog
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw
from moeclipse.train.checkpoints.disk import Disk
from moeclipse.train.config import TrainConfig
from moeclipse.train.run.trainer import Run, Silence

STEPS, KILLS = 8, 5
PIPE: dict[str, Any] = {"parallel.pp": 2, "optim.accumulate": 2}
TENSOR: dict[str, Any] = {"parallel.tp": 2, "model.num_kv_heads": 2}
MOVES: dict[str, Any] = {"placement.planner": "random", "placement.start_step": 1, "placement.every": 2}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "pipeline": ({"pp": 2}, {**PIPE, "pipeline.schedule": "1f1b"}),
    "two directions": (
        {"pp": 2},
        {**PIPE, "optim.accumulate": 4, "pipeline.schedule": "dualpipev", "model.num_layers": 4},
    ),
    "tensor": ({"tp": 2}, TENSOR),
    "sharded experts": ({"tp": 2}, {**TENSOR, "moe.expert_tp": "sharded"}),
    "moving experts": ({}, {**MOVES, "placement.slots_per_rank": 3}),
    "smart": ({}, {"moe.schedule": "smart", "moe.shadow": "auto", "optim.accumulate": 2}),
    "shared owners": ({}, {"placement.slots": ((0, 1, 2), (3, 2, 0))}),
    "saves in flight": ({"dp": 2}, {"checkpoint.every": 1}),
}
WRITES = ("create", "write", "fsync", "rename", "unlink")


class Counted(deque[LoggedOp]):
    """Ops of a rank, which are noted here whoever launches them."""

    def __init__(self, log: OpLog, count: Callable[[], None]) -> None:
        super().__init__(log.recent, log.recent.maxlen)
        self._count = count

    def append(self, op: LoggedOp) -> None:
        self._count()
        super().append(op)


def counting(count: Callable[[], None], what: str, log: OpLog) -> None:
    """From now on every op, or all that is done to the disk, is counted; disks are slow."""
    if what == "op":
        log.recent = Counted(log, count)
        return
    for name in WRITES:
        real = getattr(Disk, name)

        def done(self: Disk, *args: Any, real: Any = real) -> Any:
            time.sleep(0.01)  # so that steps are trained while it writes
            count()
            return real(self, *args)

        setattr(Disk, name, done)


def train(mesh: Mesh, config: TrainConfig, resume: str, what: str, victim: int = -1, at: int = 0) -> int:
    """How much was counted; the victim ends before it counts further than `at`."""
    counted = 0

    def count() -> None:
        nonlocal counted
        counted += 1
        if mesh.rank == victim and counted == at:
            os.kill(os.getpid(), signal.SIGKILL)

    counting(count, what, mesh.watch.log)
    Run(config, mesh, Silence()).whole(resume)
    return counted


def tensors(config: TrainConfig) -> dict[str, str]:
    """Of the last checkpoint: its files of tensors, to the bit."""
    folder = Path(config.run.dir) / config.run.name / "checkpoints" / f"step-{STEPS:08d}"
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_killed_run_ends_with_the_bits_of_the_whole_one(tmp_path: Path, name: str) -> None:
    axes, changes = LAYOUTS[name]
    shared = {"run.steps": STEPS, "checkpoint.asynchronous": True, **changes}
    whole = configure(tmp_path, **shared, **{"run.name": "whole"})
    what = "disk" if name == "saves in flight" else "op"
    counts = run_ranks(2, train, whole, "off", what, **axes)
    expected, last = losses(whole), tensors(whole)
    assert len(expected) == STEPS
    draw = random.Random(name)
    for number in range(KILLS):
        victim = draw.randrange(2)
        at = draw.randint(1, counts[victim])
        config = configure(tmp_path, **shared, **{"run.name": f"killed-{number}"})
        told = run_ranks_raw(2, train, config, "off", what, victim, at, **axes)
        where = f"{name}: rank {victim} at {what} {at} of {counts[victim]}"
        assert not any(ok for ok, _ in told), where
        run_ranks(2, train, config, "auto", what, **axes)
        assert losses(config) == expected, where
        assert tensors(config) == last, where
        print(where)
