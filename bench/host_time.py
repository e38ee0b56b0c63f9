"""What the host needs for a step of two ranks: kernels and rows are so small that nobody waits for them.

    nvidia-cuda-mps-control -d
    .venv/bin/python bench/host_time.py [--layers 12] [--microbatches 4] [--rounds 5] [--json F] [--smoke]

Ranks share one GPU under MPS and the experts (ep 2, ep 4), or only gradients (dp 2), over NCCL. Ways to
train take turns in one process: `run.graphs` auto and off, and all tokens gathered (`moe.schedule`) over
memory that ranks map (peer) or by NCCL. The table shows medians, and what Python launches. NCCL over the
sockets of one host is slow: `host_ms` is a step without the time in which the host waits for events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _launches import counted
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
LAYOUTS = ("ep 2", "ep 4", "dp 2")
PLAIN: dict[str, dict[str, Any]] = {"graphs": {"run.graphs": "auto"}, "eager": {"run.graphs": "off"}}
GATHERED = {"moe.schedule": "gathered"}
WAYS: dict[str, dict[str, Any]] = {
    **PLAIN,
    "gathered, peer": {**GATHERED, "moe.transport": "peer"},
    "gathered, nccl": {**GATHERED, "moe.transport": "direct"},
}
WARM = 4


def main() -> int:
    parser = BenchParser(__doc__, smoke={"layers": 1, "microbatches": 1, "rounds": 1})
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    given = parser.parse_args()
    if left_without_gpu(__file__, given, on_cpu=False):
        return 2
    size = {"model.num_layers": given.layers, "optim.accumulate": given.microbatches}
    size |= {"data.batch_size": 4 * given.microbatches}
    rows = []
    print(f"{'ranks':8}{'way':18}{'step_ms':>10}{'host_ms':>10}{'launches':>10}  loss")
    for layout in given.layouts:
        kind, ranks = layout.split()
        dp, ways = (
            int(ranks) if kind == "dp" else 1,
            [way for way in given.ways if kind == "ep" or way in PLAIN],
        )
        over: dict[str, Any] = {"dp": dp, "device": "cuda", "backend": "nccl", "deadline_s": 300}
        found = run_ranks(int(ranks), measure, size, given.rounds, ways, **over)[0]
        for way, (times, launches, loss) in found.items():
            step_ms, host_ms = (statistics.median(column) for column in zip(*times, strict=True))
            row = {"ranks": layout, "way": way, "step_ms": step_ms, "host_ms": host_ms, "loss": loss}
            rows.append({**row, "launches": launches, "times": times})
            print(f"{layout:8}{way:18}{step_ms:10.1f}{host_ms:10.1f}{launches:10d}  {loss:.4f}", flush=True)
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
    mesh: Mesh, size: dict[str, Any], rounds: int, ways: list[str]
) -> dict[str, tuple[list[tuple[float, float]], int, float]]:
    """For each way: milliseconds of steps, launches of one, the last loss."""
    learners = {
        way: Learner(with_values(TrainConfig(), {**SMALL, **size, **WAYS[way]}), mesh) for way in ways
    }
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in learners}
    losses = dict.fromkeys(learners, 0.0)
    waits = Waits()
    for turn in range(WARM + rounds):
        for way, learner in learners.items():
            torch.cuda.synchronize()
            waits.take()
            before = time.perf_counter()
            losses[way] = learner.step(turn)["loss"]
            torch.cuda.synchronize()
            step_ms = 1e3 * (time.perf_counter() - before)
            if turn >= WARM:
                times[way].append((step_ms, step_ms - waits.take()))
    return {
        way: (times[way], launches_of(learner, WARM + rounds), losses[way])
        for way, learner in learners.items()
    }


def launches_of(learner: Learner, step: int) -> int:
    with counted() as found:
        learner.step(step)
    return found.number


if __name__ == "__main__":
    raise SystemExit(main())
