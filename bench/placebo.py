"""How often a gain would be told at places of a run at which no plan was, beside other work.

    .venv/bin/python bench/placebo.py [--json FILE]     five runs, 40 places each
    .venv/bin/python bench/placebo.py --smoke           one short run

Two ranks train `tiny` (small batches, no planner) while a process beside them computes for some seconds and
rests for some, by turns that are drawn. At each place `report/gain` is asked what a plan taken there would
have won; what is told beyond twice its noise is made of weather alone. `medians` counts the same for medians
of 20 steps on both sides, with noise from their own spread.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from _smoke import FEW_TOKENS, BenchParser, machine, write

from moeclipse.report.gain import MOST_STEPS, Lines, PlanTaken, cost_of_a_row, estimate
from moeclipse.report.run import RunData, read_run

SETTINGS = ("--placement.planner", "static", "--run.sample", "0")
SECONDS = (3.0, 20.0)
"""That other work lasts, and rests."""


def other_work(seed: int) -> None:
    """Computes and rests until it is ended."""
    draw = random.Random(seed)
    while True:
        end = time.monotonic() + draw.uniform(*SECONDS)
        while time.monotonic() < end:
            sum(range(10_000))
        time.sleep(draw.uniform(*SECONDS))


def train(folder: Path, steps: int, batch: int, seed: int) -> RunData:
    beside = multiprocessing.Process(target=other_work, args=(seed,), daemon=True)
    beside.start()
    words = ["train", "--preset", "tiny", "--ranks", "2", *SETTINGS, "--run.steps", str(steps)]
    words += ["--run.dir", str(folder), "--run.name", f"run-{seed}", "--run.seed", str(seed)]
    words += ["--data.batch-size", str(batch), "--checkpoint.every", "0"]
    try:
        subprocess.run([sys.executable, "-m", "moeclipse", *words], check=True, stdout=subprocess.DEVNULL)
    finally:
        beside.terminate()
        beside.join()
    return read_run(folder / f"run-{seed}")


def medians_tell(step_ms: np.ndarray, place: int) -> bool:
    found = []
    for side in (step_ms[place - MOST_STEPS : place], step_ms[place + 1 : place + 1 + MOST_STEPS]):
        sigma = 1.4826 * np.median(np.abs(side - np.median(side)))
        found.append((np.median(side), 1.2533 * sigma / math.sqrt(len(side))))
    (before, noise), (after, more) = found
    return bool(before - after > 2 * math.hypot(noise, more))


def count(run: RunData, places: int) -> dict[str, float]:
    """Places at which something is told; trials of cuts take a run's first tenth at most."""
    steps, lines, cost = len(run.steps.step), Lines.of(run), cost_of_a_row(run)
    since, step_ms = steps // 10, run.steps.column("step_ms")
    found = dict.fromkeys(("places", "noise_known", "by_rows", "by_clock", "either", "medians"), 0)
    for place in np.linspace(since + MOST_STEPS, steps - MOST_STEPS - 2, places).astype(int).tolist():
        gain = estimate(lines, cost, [PlanTaken(step=place, asked=place, since=since)])
        by_rows = gain.rows is not None and gain.rows.stands_out and gain.rows.ms > 0
        by_clock = gain.clock is not None and gain.clock_tells and gain.clock.ms > 0
        known = gain.clock is not None and gain.clock.noise_ms is not None
        told = (1, known, by_rows, by_clock, by_rows or by_clock, medians_tell(step_ms, place))
        for name, one in zip(found, told, strict=True):
            found[name] += one
    return {**found, "step_ms": float(np.median(step_ms[run.window]))}


def main() -> int:
    parser = BenchParser(__doc__, smoke={"runs": 1, "steps": 60, "places": 4})
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--places", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    given = parser.parse_args()
    batch = FEW_TOKENS["data.batch_size"] if given.smoke else given.batch
    rows = []
    for seed in range(given.runs):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(count(train(Path(folder), given.steps, batch, seed), given.places))
        print("  ".join(f"{name} {value:g}" for name, value in rows[-1].items()), flush=True)
    total = {name: sum(row[name] for row in rows) for name in rows[0] if name != "step_ms"}
    shares = {name: total[name] / total["places"] for name in total if name != "places"}
    print(f"of {total['places']:g} places: " + ", ".join(f"{k} {100 * v:.1f} %" for k, v in shares.items()))
    write(given.json, {"machine": machine(), "runs": rows, "shares": shares})
    return 0


if __name__ == "__main__":
    sys.exit(main())
