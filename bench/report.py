"""The report of a long run of a large model: 10,000 steps, 32 layers of 64 experts, 16 ranks.

    python bench/report.py

Prints how long its figures take, how large the page is, how long until a browser has drawn it (Chromium, its
driver and selenium), and what a name costs in a step that is not traced. Medians of five.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent.parent / "tests" / "report"))
from browser import missing, opened, visit
from made_runs import make_run, record_of, write_lines, write_loads

from moeclipse.comm.flight.record import Recorder
from moeclipse.report.page import page_of, write_page
from moeclipse.report.run import read_run

STEPS, LAYERS, EXPERTS, RANKS, TIMES = 10_000, 32, 64, 16, 5


def seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return median(taken)


def main() -> None:
    with TemporaryDirectory() as name:
        folder = make_run(Path(name) / "run", steps=3)
        rng = np.random.default_rng(0)
        noise = rng.random(STEPS).tolist()
        records = [record_of(step, RANKS, loss=noise[step]) for step in range(STEPS)]
        write_lines(folder / "metrics.jsonl", records)
        write_loads(folder, rng.integers(0, 5000, (256, LAYERS, EXPERTS)), RANKS)
        run, page = read_run(folder), folder / "report.html"
        print(
            f"read: {seconds(lambda: read_run(folder)):.2f} s, page: {seconds(lambda: page_of([run])):.2f} s"
        )
        write_page([run], page)
        print(f"size: {page.stat().st_size / 1e6:.2f} MB")
        if why := missing():
            print(f"browser: {why}")
        else:
            with opened() as driver:
                print(f"drawn in a browser after {seconds(lambda: visit(driver, page)):.2f} s")
    recorder, count = Recorder(torch.device("cpu")), 10_000

    def marks() -> None:
        for number in range(count):
            with recorder.mark(number):
                pass

    print(f"a name in a step that is not traced: {1e6 * seconds(marks) / count:.2f} microseconds")


if __name__ == "__main__":
    main()
