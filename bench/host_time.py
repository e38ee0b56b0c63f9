"""What the host needs for a step of two ranks: kernels and rows are so small that nobody waits for them.

    nvidia-cuda-mps-control -d
    .venv/bin/python bench/host_time.py [--layers 12] [--microbatches 4] [--rounds 5] [--json F] [--smoke]

Two ranks share one GPU under MPS and the experts (ep 2), or only gradients (dp 2), over NCCL. Steps with
`run.graphs` auto and off take turns in one process; the table shows medians, and what Python launches. NCCL
over the sockets of one host is slow: `host_ms` is a step without the time in which the host waits for events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _smoke import BenchParser, left_without_gpu, machine, write

from moeclipse.comm.async_ops import lane, reading
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

SMALL: dict[str, Any] = {
    "model.d_model": 512,
    "model.num_heads": 8,
    "model.num_kv_heads": 4,
    "model.head_dim": 64,
    "model.dtype": "bfloat16",
    "moe.num_experts": 16,
    "moe.d_ff": 256,
    "moe.schedule": "blocking",
    "gate.top_k": 4,
    "data.seq_len": 256,
    "data.files": (__file__,),
}
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
WARM = 4


def main() -> int:
    parser = BenchParser(__doc__, smoke={"layers": 1, "microbatches": 1, "rounds": 1})
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if left_without_gpu(__file__, given, on_cpu=False):
        return 2
    size = {"model.num_layers": given.layers, "optim.accumulate": given.microbatches}
    size |= {"data.batch_size": 4 * given.microbatches}
    rows = []
    print(f"{'ranks':8}{'graphs':8}{'step_ms':>10}{'host_ms':>10}{'launches':>10}")
    for layout, dp in (("ep 2", 1), ("dp 2", 2)):
        over: dict[str, Any] = {"dp": dp, "device": "cuda", "backend": "nccl", "deadline_s": 300}
        found = run_ranks(2, measure, size, given.rounds, **over)[0]
        for graphs, (times, launches) in found.items():
            step_ms, host_ms = (statistics.median(column) for column in zip(*times, strict=True))
            row = {"ranks": layout, "graphs": graphs, "step_ms": step_ms, "host_ms": host_ms}
            rows.append({**row, "launches": launches, "times": times})
            print(f"{layout:8}{graphs:8}{step_ms:10.1f}{host_ms:10.1f}{launches:10d}", flush=True)
    write(given.json, {"rows": rows, "machine": machine()})
    return 0


class Waits:
    """How long the host waited for the device."""

    def __init__(self) -> None:
        self.ms = 0.0
        for module in (lane, reading):
            module.poll = self.timed(module.poll)  # type: ignore[attr-defined]
        torch.cuda.synchronize = self.timed(torch.cuda.synchronize)

    def timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any) -> Any:
            before = time.perf_counter()
            try:
                return wait(*args)
            finally:
                self.ms += 1e3 * (time.perf_counter() - before)

        return waiting

    def take(self) -> float:
        ms, self.ms = self.ms, 0.0
        return ms


def measure(
    mesh: Mesh, size: dict[str, Any], rounds: int
) -> dict[str, tuple[list[tuple[float, float]], int]]:
    """For each choice: milliseconds of steps, launches of one."""
    learners = {
        graphs: Learner(with_values(TrainConfig(), {**SMALL, **size, "run.graphs": graphs}), mesh)
        for graphs in ("auto", "off")
    }
    times: dict[str, list[tuple[float, float]]] = {graphs: [] for graphs in learners}
    waits = Waits()
    for turn in range(WARM + rounds):
        for graphs, learner in learners.items():
            torch.cuda.synchronize()
            waits.take()
            before = time.perf_counter()
            learner.step(turn)
            torch.cuda.synchronize()
            step_ms = 1e3 * (time.perf_counter() - before)
            if turn >= WARM:
                times[graphs].append((step_ms, step_ms - waits.take()))
    return {
        graphs: (times[graphs], launches_of(learner, WARM + rounds)) for graphs, learner in learners.items()
    }


def launches_of(learner: Learner, step: int) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        learner.step(step)
    return sum(event.name.startswith(LAUNCHES) for event in found.events())


if __name__ == "__main__":
    raise SystemExit(main())
