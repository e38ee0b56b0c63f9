"""Folders of runs, as training leaves them, without the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moeclipse.balance.load import Load

CONFIG = """
[run]
name = "{name}"
steps = {steps}
[moe]
schedule = "blocking"
[metrics]
warmup_steps = 3
"""

PROBE = {
    "row_forward": 1e-4,
    "row_backward": 2e-4,
    "kernel": 0.0,
    "latency": 0.0,
    "bandwidth": 1e6,
    "link": 1e6,
    "shared_wire": False,
    "row_bytes": 100.0,
    "parameter_bytes": 100.0,
    "gradient_bytes": 200.0,
}
CHOICES = {"ranks": [1, 2, 1, 1], "layers": {}, "placement": PROBE, "hosts": [0, 0]}
"""What two ranks measured for planners."""


def record_of(step: int, ranks: int = 2, **more: Any) -> dict[str, Any]:
    """A line of metrics: rank 1 has more rows, computes longer, and the others wait for it."""
    rows = [1000.0 + 10 * (step % 7), *[1400.0 - 10 * (step % 7)] * (ranks - 1)]
    compute = [50 + 0.05 * count for count in rows]
    late = [max(compute) - one for one in compute]
    times = {
        "compute_ms": compute,
        "exposed_ms": [6.0] * ranks,
        "straggle_ms": late,
        "idle_ms": [2.0] * ranks,
        "comm_ms": [20.0] * ranks,
    }
    times["step_ms"] = [max(compute) + 8.0] * ranks
    means = {name: sum(values) / ranks for name, values in times.items()}
    return {
        "step": step,
        "loss": 5.0 / (1 + step),
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens_per_s": 2048e3 / means["step_ms"],
        "num_tokens": 2048,
        **means,
        "hidden_ms": means["comm_ms"] - means["exposed_ms"],
        "ranks": {**times, "rows": rows},
        "load": [[1, 2], [3, 4]],
        "balance": (sum(rows) / ranks) / max(rows),
        "dropped": 0,
        "skipped": False,
        **more,
    }


def make_run(folder: Path, *, steps: int = 20, ranks: int = 2, name: str = "made", **more: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(name=name, steps=steps))
    records = [record_of(step, ranks, **more) for step in range(steps)]
    write_lines(folder / "metrics.jsonl", records)
    (folder / "summary.json").write_text(json.dumps({"window": f"steps 3 to {steps - 1}"}))
    rows_NLE = np.arange(steps * 2 * 4).reshape(steps, 2, 4) % 5 * 10
    write_loads(folder, rows_NLE, ranks)
    return folder


def write_loads(folder: Path, rows_NLE: np.ndarray, ranks: int) -> None:
    average_LPE = np.repeat(rows_NLE.mean(0)[:, None] / ranks, ranks, axis=1)
    Load(average_LPE=average_LPE, steps_N=np.arange(len(rows_NLE)), rows_NLE=rows_NLE).save(
        folder / "load.npz"
    )


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def slice_of(
    rank: int, lane: int, kind: str, name: str, start: float, length: float, **told: Any
) -> dict[str, Any]:
    """A slice of a trace, in microseconds."""
    place = {"pid": rank, "tid": lane, "ts": start, "dur": length}
    return {"ph": "X", "cat": kind, "name": name, **place, "args": told}


def make_trace(folder: Path) -> None:
    """One step of two ranks, measured and simulated."""
    events = []
    for rank in (0, 1, 1_000_000, 1_000_001):
        for lane, name in enumerate(("compute", "a2a")):
            named = {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
            events.append(named)
        events.append(slice_of(rank, 0, "compute", "microbatch 0", 100, 900))
        events.append(slice_of(rank, 0, "compute", "layer 0 F", 120, 300))
        told = {"hidden_us": 150.0, "exposed_us": 40.0, "late_us": 10.0}
        events.append(slice_of(rank, 1, "transfer", "dispatch of layer 0", 300, 200, **told))
        events.append(slice_of(rank, 1, "transfer", "dispatch of layer 1", 600, 200, **told))
    told = {"steps": [3, 4, 5], "left_out": 7, "simulated": "simulated with costs of this run"}
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events, "otherData": told}))
