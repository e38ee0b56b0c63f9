"""In the ranks of bench/faults.py: a fault in one step of one rank, and the times of what happens then.

STRIKE is "KIND RANK STEP"; it strikes in the first attempt. STRIKE_LOG gets lines "WORD TIME ...": `struck`,
`noticed` (where no process ends), and `step ATTEMPT RANK STEP` behind every step.
"""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import torch

from moeclipse.train.run.trainer import Run
from moeclipse.train.step import learner as learner_module
from moeclipse.train.step.learner import Learner


def log(word: str, *more: object) -> None:
    with open(os.environ["STRIKE_LOG"], "a") as file:
        file.write(" ".join(map(str, (word, time.time(), *more))) + "\n")


def spoil_once(learner: Learner) -> None:
    module = next(one for name, one in learner.model.named_modules() if name.endswith("attention"))

    def spoil(_module: Any, _args: Any, out: Any) -> Any:
        handle.remove()
        return out * math.nan

    handle = module.register_forward_hook(spoil)


def flip_once(learner: Learner) -> None:
    """One bit of a moment, which exists once; between forward and update."""
    look = learner.integrity.look

    def harmed(step: int) -> list[str]:
        learner.integrity.look = look  # type: ignore[method-assign]
        learner.optim.states[0].adam_v.view(torch.int32)[0] ^= 1 << 3
        return look(step)

    learner.integrity.look = harmed  # type: ignore[method-assign]


STRIKES = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "nan": spoil_once,
    "flip": flip_once,
    "leave": lambda _: os.kill(int(os.environ["MOECLIPSE_LAUNCHER"]), signal.SIGTERM),
}


def put_in() -> None:
    kind, rank, at = os.environ["STRIKE"].split()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(os.environ["STRIKE_ATTEMPT"])
    here = attempt == 0 and os.environ.get("RANK") == rank
    begin, step = Learner.backward, Learner.step
    left = 1

    def backward(self: Learner, now: int) -> Any:
        nonlocal left
        if here and now == int(at) and left:
            left = 0
            log("struck")
            STRIKES[kind](self)
        return begin(self, now)

    def noted_step(self: Learner, now: int) -> Any:
        record = step(self, now)
        log("step", attempt, self.mesh.rank, now)
        return record

    Learner.backward, Learner.step = backward, noted_step  # type: ignore[method-assign]
    look_again, go_back = learner_module.look_again, Run._go_back

    def noted_look(*args: Any) -> Any:
        found = look_again(*args)
        log("noticed")
        return found

    def noted_back(*args: Any) -> Any:
        log("noticed")
        return go_back(*args)

    learner_module.look_again, Run._go_back = noted_look, noted_back  # type: ignore[method-assign]
