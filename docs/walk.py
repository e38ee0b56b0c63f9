"""Count the way of a row: functions of ours that are entered, their files, and changes of file.

    python docs/walk.py               a table of the four walks in docs/design.md
    python docs/walk.py --list here   every change of file of one walk, in order

A profiler sees each call of a Python function of this package on the calling thread, generated ones of
dataclasses left out. A change of file counts where the next function entered stands in another file than the
one before it; it leads back where that file was seen earlier. Two calls come first, so that nothing that is
made once is counted.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # ranks are forked

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from moeclipse import MoE
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

SOURCE = Path(__file__).resolve().parent.parent / "src" / "moeclipse"


@dataclass(frozen=True)
class Walk:
    steps: list[tuple[str, str]]
    """(file, function) of each function entered, in order."""

    @property
    def files(self) -> int:
        return len({file for file, _ in self.steps})

    @property
    def changes(self) -> list[tuple[str, str, bool]]:
        """(file, function, whether the file was seen earlier) at each change of file."""
        seen, changes = {self.steps[0][0]}, []
        for (before, _), (file, name) in pairwise(self.steps):
            if file != before:
                changes.append((file, name, file in seen))
                seen.add(file)
        return changes

    def __str__(self) -> str:
        back = sum(again for _, _, again in self.changes)
        return f"{len(self.steps):6} {self.files:6} {len(self.changes):8} {back:6}"


def walked(run: Callable[[], Any]) -> Walk:
    steps: list[tuple[str, str]] = []

    def entered(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(SOURCE)):
            steps.append((name[len(str(SOURCE)) + 1 :], frame.f_code.co_name))

    sys.setprofile(entered)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(steps)


def layer_walk(mesh: Mesh, **exchange: Any) -> Walk:
    """Of one forward in training."""
    layer = MoE(d_model=32, d_ff=64, num_experts=8, top_k=2, exchange=exchange, mesh=mesh)
    x_TD = torch.randn(16, 32, requires_grad=True)
    for _ in range(3):
        layer(x_TD).sum().backward()
    return walked(lambda: layer(x_TD))


def step_walk(mesh: Mesh) -> Walk:
    """Of one step of the preset `tiny`, two short samples."""
    config = with_values(load(preset="tiny"), {"data.seq_len": 32, "data.batch_size": 2})
    learner = Learner(config, mesh)
    for step in range(3):
        learner.step(step)
    return walked(lambda: learner.step(3))


WALKS: dict[str, tuple[int, Callable[[Mesh], Walk]]] = {
    "one rank": (1, partial(layer_walk, schedule="blocking")),
    "blocking": (2, partial(layer_walk, schedule="blocking")),
    "smart": (2, partial(layer_walk, schedule="smart", chunks=2, group_size=1)),
    "step": (1, step_walk),
}
"""By name: ranks, and what is walked."""


def steps_of(name: str) -> list[tuple[str, str]]:
    ranks, walk = WALKS[name]
    steps: list[tuple[str, str]] = run_ranks(ranks, lambda mesh: walk(mesh).steps)[0]
    return steps


def main() -> None:
    only = sys.argv[2] if sys.argv[1:2] == ["--list"] else None
    print(f"{'':10} {'calls':>6} {'files':>6} {'changes':>8} {'back':>6}")
    for name in WALKS if only is None else [only]:
        walk = Walk(steps_of(name))
        print(f"{name:10} {walk}")
        if only:
            print("\n".join(f"  {file:40} {function}" for file, function, _ in walk.changes))


if __name__ == "__main__":
    main()
