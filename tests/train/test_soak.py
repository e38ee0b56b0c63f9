"""A long run stays as it is: memory, file descriptors, threads and shared memory do not grow with steps.

`make soak` runs it for an hour; `make test-full` for five minutes (SOAK_S sets the seconds).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

SECONDS = float(os.environ.get("SOAK_S", "240"))
EVERY_S = 1.0
RUN = {
    "--model.num-layers": 2,
    "--model.d-model": 32,
    "--model.num-heads": 2,
    "--model.num-kv-heads": 1,
    "--model.head-dim": 16,
    "--moe.num-experts": 8,
    "--moe.d-ff": 32,
    "--data.seq-len": 16,
    "--data.batch-size": 4,
    "--run.steps": 10**9,
    "--run.name": "soak",
    "--checkpoint.minutes": 0.1,
    "--integrity.every": 50,
    "--placement.planner": "incremental",
    "--placement.every": 200,
    "--ranks": 2,
    "--run.device": "cpu",
}


def children_of(pid: int) -> list[int]:
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended, such as that of a save
            for child in listing.read_text().split():
                found += [int(child), *children_of(int(child))]
    return found


def sample(pid: int) -> dict[str, float]:
    """Of a process: resident MB, descriptors, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "memory": int(status["VmRSS"].split()[0]) / 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }


def growth(values: Sequence[float]) -> float:
    """From the second quarter of the time to the last one; the first is warm-up."""
    quarter = len(values) // 4
    return median(values[3 * quarter :]) - median(values[quarter : 2 * quarter])


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.full
@pytest.mark.long
def test_nothing_grows_with_steps(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    words = [str(word) for pair in RUN.items() for word in pair]
    command = [sys.executable, "-m", "moeclipse", "train", *words, "--run.dir", str(tmp_path)]
    with (tmp_path / "out.txt").open("w") as out:
        run = subprocess.Popen(command, stdout=out, stderr=out)
    samples: dict[int, list[dict[str, float]]] = {}
    try:
        metrics = tmp_path / "soak" / "metrics.jsonl"
        while lines_in(metrics) < 50:
            assert run.poll() is None, (tmp_path / "out.txt").read_text()
            time.sleep(EVERY_S)
        until = time.monotonic() + SECONDS
        steps = lines_in(metrics)
        while time.monotonic() < until:
            assert run.poll() is None, (tmp_path / "out.txt").read_text()
            for pid in (run.pid, *children_of(run.pid)):
                with contextlib.suppress(OSError):  # a child that lives for a moment
                    samples.setdefault(pid, []).append(sample(pid))
            time.sleep(EVERY_S)
        steps = lines_in(metrics) - steps
    finally:
        run.send_signal(signal.SIGTERM)
        try:
            run.wait(60)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
    whole = {pid: found for pid, found in samples.items() if len(found) > 0.9 * SECONDS / EVERY_S / 2}
    assert len(whole) >= 3, "the launcher and two ranks"
    assert steps > 100
    report = {
        pid: {what: growth([one[what] for one in found]) for what in found[0]} for pid, found in whole.items()
    }
    print(steps, "steps;", report)
    for found in report.values():
        # Pages of checkpoints and of the allocator come and go; a record kept for every step does not.
        assert found["memory"] < 12, report
        assert found["descriptors"] <= 2, report
        assert found["threads"] <= 1, report
    assert set(os.listdir("/dev/shm")) <= shared, "shared memory was left behind"
