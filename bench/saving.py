"""What saving and checking cost a step: the stall of a save beside training, of a plain one, and of a check.

    .venv/bin/python bench/saving.py [--preset tiny] [--steps 8] [--sparse] [--json FILE] [--KEY VALUE ...]
    .venv/bin/python bench/saving.py --smoke

One process, on a GPU where there is one. `stall` is how long the main thread is kept: for the copy and the
agreements of a save beside training, for everything of a plain save; `first` is the stall of the first save
of a run, after its memory was made ready beside steps (the slowest of them is told). Saves go to a folder
that is removed; with `--sparse` bytes are hashed and not written, for states that are larger than the disk,
and there is no plain save.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path

import torch
from _smoke import BenchParser, write

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.train.checkpoints.async_save import AsyncSave
from moeclipse.train.checkpoints.disk import DISK
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

HOLE_BYTES = 1 << 20


def seconds(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def leave_holes(file: FileIO, data: memoryview) -> None:
    """Instead of `Disk.write`: what is large becomes a hole of its size."""
    if data.nbytes < HOLE_BYTES:
        file.write(data)
    else:
        file.truncate(file.seek(data.nbytes, 1))


def one_round(
    learner: Learner, number: int, folder: Path, beside: AsyncSave, sparse: bool
) -> dict[str, float]:
    """A step, a save with a step beside it, a save that training waits for, and a check."""
    integrity = learner.integrity
    times = {"step": seconds(lambda: learner.step(number))}
    stall = seconds(lambda: learner.save(folder, number, beside))
    times["under"] = seconds(lambda: learner.step(number))
    while beside.under_way:
        while not beside.ended:
            time.sleep(0.01)
        stall += seconds(beside.advance)
    times["stall"], never = stall, integrity.config
    times["whole"] = 0.0 if sparse else seconds(lambda: learner.save(folder, number))
    integrity.config = replace(never, every=1)
    times["check"] = seconds(lambda: (integrity.look(number), integrity.remember(number)))
    integrity.config = never
    return times


def measure(preset: str, steps: int, changes: dict[str, int], folder: Path, sparse: bool) -> dict[str, float]:
    config = with_values(load(preset=preset), {"integrity.every": 0, **changes})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    learner = Learner(config, Mesh.single(device))
    beside = AsyncSave()
    for _ in range(3):  # kernels are compiled, graphs captured
        learner.step(0)
    learner.make_save_ready(beside)
    slowest = 0.0
    while beside.memory is not None and not beside.memory.ready:
        slowest = max(slowest, seconds(lambda: learner.step(0)))
    first = one_round(learner, 0, folder, beside, sparse)["stall"]
    rounds = [one_round(learner, number, folder, beside, sparse) for number in range(1, steps + 1)]
    found = {f"{name}_ms": 1e3 * statistics.median(one[name] for one in rounds) for name in rounds[0]}
    state = sum(piece.num_bytes for piece in learner.optim.pieces())
    return found | {"state_mb": state / 1e6, "first_ms": 1e3 * first, "slowest_ms": 1e3 * slowest}


def main() -> int:
    parser = BenchParser(__doc__, smoke={"steps": 1})
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sparse", action="store_true", help="write nothing")
    given, rest = parser.parse_known_args()
    changes = {key.removeprefix("--"): int(value) for key, value in zip(rest[::2], rest[1::2], strict=True)}
    if given.sparse:
        DISK.write = leave_holes  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.preset, given.steps, changes, Path(folder), given.sparse)
    step, stall, under, whole, check = (
        found[f"{name}_ms"] for name in ("step", "stall", "under", "whole", "check")
    )
    print(f"{given.preset} {changes or ''}: state {found['state_mb']:.0f} MB, step {step:.1f} ms")
    print(f"  save beside training: stall {stall:.1f} ms ({stall / step:.1%} of a step)", end="")
    print(f", the first {found['first_ms']:.1f} ms; slowest step before it {found['slowest_ms']:.1f} ms")
    print(f"  the step beside it {under:.1f} ms; a save that training waits for {whole:.1f} ms")
    print(f"  integrity: a check {check:.1f} ms, every 100 steps {check / step:.2f} % of the time")
    write(given.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
