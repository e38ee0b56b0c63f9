"""A run of `moeclipse train` whose seats (`cli/seats`) can be lost and come back while it trains.

A `sitecustomize.py` on the path of the ranks looks at files in the run's working folder: while `gone-1` is
there, no process on seat 1 gets as far as training, and while `kill-1` is, the rank on it kills itself at the
step that the file names, and takes the file away. While `hold-6` is there, ranks wait before step 6 and say
`held-RANK`; `slow` says how many seconds they wait before each. While `hold-save-6` is there, files of the
checkpoint of step 6 are not created, which is said as well, and training goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).parent.parent.parent / "src")
SITE = """
import os, signal, sys, time
seats = os.environ.get("MOECLIPSE_SEATS", "")
if "RANK" in os.environ or "ask_seat" in " ".join(sys.orig_argv):
    seat = seats.split(",")[int(os.environ.get("LOCAL_RANK", "0")) if seats else 0]
    if os.path.exists(f"gone-{seat}"):
        os._exit(9)
    if "RANK" in os.environ:
        from moeclipse.comm.watch import op_log
        from moeclipse.train.checkpoints.disk import Disk
        begin, create = op_log.OpLog.begin_step, Disk.create
        def wait(name):
            while os.path.exists(name):
                open(f"held-{os.environ['RANK']}", "w").close()
                time.sleep(0.02)
        def late(self, path):
            wait(f"hold-save-{int(path.parent.name.split('-')[2])}")
            return create(self, path)
        Disk.create = late
        def dying(self, step):
            wait(f"hold-{step}")
            if os.path.exists("slow"):
                time.sleep(float(open("slow").read()))
            if os.path.exists(f"kill-{seat}") and step == int(open(f"kill-{seat}").read()):
                os.unlink(f"kill-{seat}")
                os.kill(os.getpid(), signal.SIGKILL)
            return begin(self, step)
        op_log.OpLog.begin_step = dying
"""
RUN = {
    "model.num-layers": 2,
    "model.d-model": 32,
    "model.num-heads": 2,
    "model.num-kv-heads": 1,
    "model.head-dim": 16,
    "model.dtype": "float64",
    "moe.num-experts": 6,
    "moe.d-ff": 32,
    "data.seq-len": 16,
    "data.batch-size": 5,
    "optim.warmup-steps": 2,
    "run.device": "cpu",
    "run.name": "r",
}


def start(folder: Path, *words: object, python: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    (folder / "sitecustomize.py").write_text(SITE)
    hidden = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "GLOO_SOCKET_IFNAME")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    flags = [str(word) for key, value in RUN.items() for word in (f"--{key}", value)]
    command = [sys.executable, *(python or ("-m", "moeclipse")), "train", *flags, *map(str, words)]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=kept
        | {"PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(run: subprocess.Popen[str], timeout_s: float = 900.0) -> tuple[int, str, str]:
    try:
        out, err = run.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        run.terminate()
        raise AssertionError(f"it did not end: {run.communicate(timeout=900)}") from None
    return run.returncode, out, err


def records(folder: Path, name: str = "r", file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = folder / "runs" / name / file
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses(folder: Path, name: str = "r") -> list[float]:
    return [record["loss"] for record in records(folder, name)]


def wait_for(condition: Callable[[], bool], run: subprocess.Popen[str], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
