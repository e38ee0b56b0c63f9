"""What a check of integrity costs, and what share of a run `integrity.every = "auto"` makes of it.

    .venv/bin/python bench/integrity_cost.py [--preset 5b] [--seconds 60] [--json FILE] [--KEY VALUE ...]
    .venv/bin/python bench/integrity_cost.py --smoke

One process, on a GPU where there is one. `check` is all of a checked step that other steps do not have: the
digests behind the update before it, and their comparison; `before a save` is what every save adds. Both are
medians of `--repeats`. Then steps are trained for `--seconds` as a run trains them, and the steps that were
checked, the seconds between them and their share of all seconds are told: by the run's own clock, which is
what it decides by. The first check comes at once; where one takes longer than its share of the time that was
given, the share is above 0.5 %, and the seconds after which it is not are told.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from _smoke import FEW_TOKENS, BenchParser, device, machine, synchronize, write

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.train.presets import load
from moeclipse.train.step.integrity import SHARE
from moeclipse.train.step.learner import Learner

WARM_UP = 3
LONG = 10**9  # steps: the last one of a run, which is always checked, does not come


def seconds(work: Callable[[], object]) -> float:
    synchronize()
    begun = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begun


def single_costs(learner: Learner, repeats: int) -> dict[str, float]:
    """Seconds of a step, of a check, and of what a save adds."""
    integrity = learner.integrity
    config, times = integrity.config, []
    for number in range(repeats):
        step = seconds(lambda number=number: learner.step(number))  # type: ignore[misc]
        integrity.config = replace(config, every=1)
        look = seconds(lambda number=number: (integrity.remember(number), integrity.look(number)))  # type: ignore[misc]
        save = seconds(integrity.before_save)
        integrity.config = config
        times.append((step, look, save))
    return {
        name: statistics.median(column)
        for name, column in zip(("step_s", "check_s", "save_s"), zip(*times, strict=True), strict=True)
    }


def share_of_a_run(learner: Learner, budget_s: float) -> dict[str, float]:
    """As a run does it: checks where the clock allows one more."""
    integrity, checked = learner.integrity, list[float]()
    integrity.spent_s, integrity._check_s, integrity._begun = 0.0, 0.0, integrity._clock()
    steps, begun = 0, time.perf_counter()
    while (now := time.perf_counter() - begun) < budget_s or steps < WARM_UP:
        if integrity.is_due(steps):
            checked.append(now)
        learner.step(steps)
        steps += 1
    synchronize()
    whole = time.perf_counter() - begun
    between = [later - earlier for earlier, later in pairwise(checked)]
    return {
        "steps": steps,
        "checked": len(checked),
        "share": integrity.spent_s / whole,
        "between_s": statistics.median(between) if between else 0.0,
        "seconds": whole,
    }


def main() -> int:
    parser = BenchParser(__doc__, smoke={"preset": "tiny", "seconds": 1.0, "repeats": 1})
    parser.add_argument("--preset", default="5b")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=7)
    given, rest = parser.parse_known_args()
    changes = {key.removeprefix("--"): int(value) for key, value in zip(rest[::2], rest[1::2], strict=True)}
    changes |= FEW_TOKENS if given.smoke else {}
    config = with_values(load(preset=given.preset), {"integrity.every": "auto", "run.steps": LONG, **changes})
    learner = Learner(config, Mesh.single(torch.device(device())))
    for step in range(WARM_UP):  # kernels are compiled, graphs captured
        learner.step(step)
    found = {**single_costs(learner, given.repeats), **share_of_a_run(learner, given.seconds)}
    state = sum(piece.num_bytes for piece in learner.optim.pieces())
    found |= {"state_mb": state / 1e6, "machine": machine()}
    step, check = found["step_s"], found["check_s"]
    print(f"{given.preset} {changes or ''}: state {found['state_mb']:.0f} MB, step {1e3 * step:.1f} ms")
    print(f"  a check {1e3 * check:.1f} ms, {check / step:.2f} of a step", end="")
    print(f"; before a save {1e3 * found['save_s']:.1f} ms")
    print(
        f"  auto: {found['checked']} of {found['steps']} steps checked in {found['seconds']:.1f} s, "
        f"one every {found['between_s']:.1f} s: {found['share']:.2%} of the time (bound {SHARE:.1%}, "
        f"which one check takes of {check / SHARE:.0f} s)"
    )
    write(given.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
