"""Runs `moeclipse train` in which one rank is killed, or stands still, at an op that is named.

A `sitecustomize.py` on the path of the ranks looks at every op that is logged: FAULT is "RANK SIGNAL COUNT
PATTERN", and the rank sends itself the signal when it launches the COUNT-th op whose lane, label and step
match, in the first attempt only (FAULT_ATTEMPTS: in so many). The time of the fault is in a file `fault`.
PATIENT_AGENT: torch's agent kills nobody within a test's time (`patient_agent.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FREEZE, KILL = int(signal.SIGSTOP), int(signal.SIGKILL)
PAIR = ("--pipeline.overlap", "pair+self", "--optim.accumulate", "4")
STAGES = ("--parallel.pp", "2", "--pipeline.schedule", "dualpipev", "--optim.accumulate", "4")
MOVES = ("--placement.planner", "random", "--placement.start-step", "1", "--placement.every", "2")
MOVES += ("--placement.slots-per-rank", "6")
POINTS = {
    "forward": ((), "9 dispatch S_F"),
    "backward": ((), "9 backward combine"),
    "pair": (PAIR, "3 compute: 0.0ATTN_B2"),
    "stage": (STAGES, "3 compute: 1.0ATTN_B2"),
    "migration": (MOVES, "2 migration of experts"),
}
"""Where a fault strikes: what the run needs for it, and the count and pattern of the op."""
TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
SITE = """
import os, re, sys, time
if "PATIENT_AGENT" in os.environ:
    from patient_agent import PatientAgent
    sys.meta_path.insert(0, PatientAgent())
attempt, most = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), os.environ.get("FAULT_ATTEMPTS", "1")
if "FAULT" in os.environ and attempt < int(most):
    rank, number, left, pattern = os.environ["FAULT"].split(" ", 3)
    if os.environ.get("RANK") == rank:
        from moeclipse.comm.watch import op_log
        write, seen = op_log.OpLog.write, [0]
        def faulty(self, op):
            write(self, op)
            seen[0] += bool(re.search(pattern, f"{op.lane}: {op.label}, step {self.step}"))
            if seen[0] == int(left):
                seen[0] += 1
                with open(os.environ["FAULT_FILE"], "w") as file:
                    file.write(str(time.time()))
                os.kill(os.getpid(), int(number))
        op_log.OpLog.write = faulty
"""


@dataclass(frozen=True, kw_only=True)
class Faulty:
    """What came of it."""

    code: int
    out: str
    err: str
    fault_at: float
    run: Path

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "incidents.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [json.loads(line)["loss"] for line in (self.run / "metrics.jsonl").read_text().splitlines()]


def train(
    folder: Path,
    *words: str,
    fault: str = "",
    attempts: int = 1,
    patient_agent: bool = False,
    timeout_s: float = 900.0,
) -> Faulty:
    """`fault` and the others: see above; empty: an undisturbed run."""
    (folder / "sitecustomize.py").write_text(SITE)
    hidden = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    path = (folder, SOURCE, os.environ.get("PYTHONPATH", ""), TESTS)
    environment |= {"PYTHONPATH": os.pathsep.join(str(place) for place in path if place)}
    environment |= {"TMPDIR": str(folder), "FAULT_FILE": str(folder / "fault")}
    if fault:
        environment |= {"FAULT": fault, "FAULT_ATTEMPTS": str(attempts)}
    if patient_agent:
        environment["PATIENT_AGENT"] = "1"
    command = [sys.executable, "-m", "moeclipse", "train", "--run.name", "r", *words]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        left = ranks_of(process.pid)
        for rank in left:
            os.kill(rank, signal.SIGKILL)
        process.kill()
    assert not left, f"left running: {left}\n{err}"
    fault_at = float((folder / "fault").read_text()) if (folder / "fault").exists() else time.time()
    run = folder / "runs" / "r"
    return Faulty(code=process.returncode, out=out, err=err, fault_at=fault_at, run=run)


def ranks_of(launcher: int) -> list[int]:
    """Processes that the launcher started: they carry its id in their environment."""
    wanted = f"MOECLIPSE_LAUNCHER={launcher}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != launcher:
                found.append(int(folder.name))
        except OSError:
            continue
    return found
