"""A trainer that trains nothing, for tests of what happens around training.

`put_in(folder)` writes a `sitecustomize.py` that makes this file `moeclipse.train.run.trainer` in every
Python that has the folder on its path, so real launchers start real ranks that cost no torch. FAKE_TRAINER
says what happens at step 2 of the first attempt: `ok`, or `EVENT:RANK`. torch's agent kills nobody within a
test's time (`patient_agent.py`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from moeclipse.core.errors import CommError, DataError

SITE = """
import os, sys
if "FAKE_TRAINER" in os.environ:
    sys.path[:0] = {folders!r}
    import fake_trainer, patient_agent
    sys.modules["moeclipse.train.run.trainer"] = fake_trainer
    sys.meta_path.insert(0, patient_agent.PatientAgent())
"""


def put_in(folder: Path) -> None:
    folders = [str(parent) for parent in Path(__file__).parents[:2]]
    (folder / "sitecustomize.py").write_text(SITE.format(folders=folders))


def train(config: Any, *, resume: str = "off", observer: Any = None, **_others: Any) -> dict[str, Any]:
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    directory = Path(config.run.dir) / config.run.name
    directory.mkdir(parents=True, exist_ok=True)
    seen = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "MASTER_ADDR")}
    line = f"rank={rank} of={num_ranks} attempt={attempt} resume={resume} {seen}\n"
    (directory / f"rank-{rank}-{attempt}").write_text(line)
    if observer is not None:
        observer.start(INFO | {"name": config.run.name, "steps": config.run.steps, "num_ranks": num_ranks})
    for step in range(1, config.run.steps + 1):
        if observer is not None:
            observer.step(
                {"step": step - 1, "loss": 5.0 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1e4}
            )
        if step == 2 and attempt == 0:
            event, _, where = os.environ["FAKE_TRAINER"].partition(":")
            happen(event, int(where or 0), rank, directory / "failed")
    if observer is not None:
        observer.end(SUMMARY | {"directory": str(directory)})
    return SUMMARY


def happen(event: str, rank: int, here: int, failed: Path) -> None:
    if event == "ok":
        return
    if rank != here:
        while not failed.exists():
            time.sleep(0.01)
        raise CommError(f"rank {rank} failed: it left")
    if event in ("raise", "config"):
        failed.touch()
        time.sleep(0.5)  # the victims are faster: a rank that fails has groups to leave
    if event == "raise":
        raise RuntimeError("boom")
    if event == "config":
        raise DataError("data.files: nothing there")
    if event == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if event == "exit":
        os._exit(7)
    if event == "stuck":
        # As in a collective whose peer does not come: C code that waits on, whatever signals arrive.
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)


INFO = {
    "dp": 1,
    "ep": 2,
    "device": "cpu",
    "dtype": "torch.float32",
    "num_parameters": 3_912_345,
    "num_active_parameters": 1_212_345,
    "corpus": "some [bold] text, 24.1 MB",
    "unigram_entropy": 3.21,
    "start_step": 0,
    "tokens_per_step": 2048,
}
SUMMARY = {
    "loss_first": 5.61,
    "loss_last": 1.92,
    "tokens_per_s": 12345.6,
    "step_ms": 166.0,
    "compute_ms": 120.0,
    "exposed_ms": 24.0,
    "straggle_ms": 12.0,
    "idle_ms": 10.0,
    "comm_ms": 60.0,
    "hidden_ms": 36.0,
    "hidden_fraction": 0.6,
    "window": "steps 4 to 200",
    "load": [100, 120, 90, 80, 30, 105, 99, 140],
    "dropped": 0,
    "unigram_entropy": 3.21,
    "checkpoint": "step-00000200",
}
