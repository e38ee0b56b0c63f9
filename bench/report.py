"""The report of a long run of a large model: 10,000 steps, 32 layers of 64 experts, 16 ranks.

    .venv/bin/python bench/report.py [--json FILE]
    .venv/bin/python bench/report.py --trace 48      what a trace costs the steps behind it, and nothing else
    .venv/bin/python bench/report.py --smoke         a short run, and what a trace costs one step; no browser

Prints how long its figures take, how large the page is, how long until a browser has drawn it (Chromium, its
driver and selenium), and what a name costs in a step that is not traced. Medians of five.

With `--trace` two ranks train preset tiny twice in the same processes, with `--trace 3` and without, in
turns; of each of so many steps behind the traced ones the slower rank counts. Steps scatter by more than a
trace could cost them, so what is there to cost anything is counted, too: names that nobody records, and the
question whether a step is traced.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent.parent / "tests" / "report"))
from _smoke import BenchParser, machine, write
from browser import missing, opened, visit
from made_runs import make_run, record_of, write_lines, write_loads

from moeclipse.comm.async_ops.record import Recorder
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.report.page import page_of, write_page
from moeclipse.report.run import read_run
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.observe.step_trace import StepTrace
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

STEPS, LAYERS, EXPERTS, RANKS, TIMES = 10_000, 32, 64, 16, 5
FIRST, MARKS = 3, 10_000


def seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return median(taken)


def race(mesh: Mesh, folder: str, repeats: int) -> list[tuple[float, float]]:
    """Seconds of the slower rank in steps behind the traced ones: (without a trace, with one)."""
    config = with_values(load(preset="tiny"), {"run.device": "cpu", "moe.transport": "direct"})
    configs = [with_values(config, {"metrics.trace": first}) for first in (-1, FIRST)]
    runs = [(learner := Learner(one, mesh), StepTrace(one, mesh, learner.model)) for one in configs]
    behind = runs[1][1].steps.stop + 1
    found = []
    for step in range(behind + repeats):
        times = [0.0, 0.0]
        for number in (0, 1) if step % 2 else (1, 0):
            learner, trace = runs[number]
            mesh.barrier()
            begun = time.perf_counter()
            trace.begin(step)
            learner.step(step)
            trace.end(step, learner.times, Path(folder), learner.program)
            times[number] = max(mesh.gather_objects(time.perf_counter() - begun))
        found += [(times[0], times[1])] if step >= behind else []
    return found


def left_behind(mesh: Mesh) -> tuple[int, float]:
    """Of a step that is not traced: names in it, and seconds to ask whether it is."""
    config = with_values(load(preset="tiny"), {"run.device": "cpu", "metrics.trace": FIRST})
    learner, recorder = Learner(config, mesh), mesh.recorder
    trace, count, real = StepTrace(config, mesh, learner.model), 0, recorder.mark

    def counted(what: Any) -> AbstractContextManager[None]:
        nonlocal count
        count += 1
        return real(what)

    recorder.mark = counted  # type: ignore[method-assign]
    learner.step(0)
    recorder.mark = real  # type: ignore[method-assign]

    def asked() -> None:
        for _ in range(MARKS):
            trace.begin(0)
            trace.end(0, learner.times, Path(), learner.program)

    return count, seconds(asked) / MARKS


def name_seconds() -> float:
    """Of a name in a step that is not traced."""
    recorder = Recorder(torch.device("cpu"))

    def marks() -> None:
        for number in range(MARKS):
            with recorder.mark(number):
                pass

    return seconds(marks) / MARKS


def trace_costs(repeats: int) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        found = run_ranks(2, race, folder, repeats, deadline_s=560.0, collective_deadline_s=120.0)[0]
        assert (Path(folder) / "trace.json").is_file()
    plain, traced = (1e3 * median(column) for column in zip(*found, strict=True))
    ratio = median(b / a for a, b in found)
    print(f"a step behind a trace: {traced:.1f} ms, without {plain:.1f}; in pairs {100 * (ratio - 1):+.2f} %")
    names, asking = run_ranks(2, left_behind)[0]
    each = name_seconds()
    share = 1e5 * (names * each + asking) / plain
    print(
        f"counted: {names} names of {1e6 * each:.2f} us, asked in {1e6 * asking:.2f} us: "
        f"{share:.4f} % of a step"
    )
    return {"plain_ms": plain, "traced_ms": traced, "names": names, "share_percent": share}


def page_costs(steps: int, browser: bool) -> dict[str, float]:
    with TemporaryDirectory() as name:
        folder = make_run(Path(name) / "run", steps=3)
        rng = np.random.default_rng(0)
        noise = rng.random(steps).tolist()
        records = [record_of(step, RANKS, loss=noise[step]) for step in range(steps)]
        write_lines(folder / "metrics.jsonl", records)
        write_loads(folder, rng.integers(0, 5000, (256, LAYERS, EXPERTS)), RANKS)
        run, page = read_run(folder), folder / "report.html"
        found = {"read_s": seconds(lambda: read_run(folder)), "page_s": seconds(lambda: page_of([run]))}
        print(f"read: {found['read_s']:.2f} s, page: {found['page_s']:.2f} s")
        write_page([run], page)
        found["page_mb"] = page.stat().st_size / 1e6
        print(f"size: {found['page_mb']:.2f} MB")
        if why := missing() if browser else "not asked for":
            print(f"browser: {why}")
        else:
            with opened() as driver:
                found["drawn_s"] = seconds(lambda: visit(driver, page))
            print(f"drawn in a browser after {found['drawn_s']:.2f} s")
    found["name_us"] = 1e6 * name_seconds()
    print(f"a name in a step that is not traced: {found['name_us']:.2f} microseconds")
    return found


def main() -> int:
    parser = BenchParser(__doc__, smoke={"trace": 1, "steps": 50})
    parser.add_argument("--trace", type=int, default=0, metavar="STEPS", help="what a trace costs, alone")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the run on the page")
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": machine()}
    if given.trace:
        found["trace"] = trace_costs(given.trace)
    if not given.trace or given.smoke:
        found["page"] = page_costs(given.steps, browser=not given.smoke)
    write(given.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
