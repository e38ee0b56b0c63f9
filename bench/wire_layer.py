"""One MoE layer of several ranks that share a GPU, beside the layer of one rank with all the rows.

    nvidia-cuda-mps-control -d
    .venv/bin/python bench/wire_layer.py [--ranks 2 4] [--configs a b ...] [--rounds 9] [--json F] [--smoke]

Under MPS every rank has its part of the experts and of the tokens, so that work and device are those of one
rank. Forward and backward, bf16, random routing; ways take turns in one process. Milliseconds, medians of the
slowest rank, and each way over `one`.

    one        one rank, a CUDA graph
    blocking   rows by copy engines through memory that ranks map, sizes told to the host
    smart      the same in units
    gathered   all tokens on every rank, over the same memory, a CUDA graph
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _smoke import BenchParser, left_without_gpu, machine, write
from moe_layer import CONFIGS

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.step.graphs import CudaCapture

PEER = {"transport": "peer"}
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "blocking": {"schedule": "blocking", **PEER},
    "smart": {"schedule": "smart", "shadow": "off", **PEER},
    "gathered": {"schedule": "gathered", **PEER},
}
GRAPHS = ("one", "gathered")
"""What a run captures, too."""
WARM, DEADLINE_S = 3, 60
"""Seconds in which ranks stand still: then they say where."""
BOUND = 2e-2
"""Of two orders of summing in bf16."""


def main() -> int:
    parser = BenchParser(__doc__, smoke={"configs": ["smoke"], "rounds": 1, "ranks": [2]})
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument(
        "--configs", nargs="+", choices=CONFIGS, default=[name for name in CONFIGS if name != "smoke"]
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    if left_without_gpu(__file__, given, on_cpu=False):
        return 2
    rows = []
    print(f"{'ranks':6}{'layer':9}" + "".join(f"{way:>18}" for way in given.ways))
    for ranks in given.ranks:
        over: dict[str, Any] = {"device": "cuda", "backend": "nccl", "deadline_s": DEADLINE_S}
        for name in given.configs:
            found = run_ranks(ranks, measure, CONFIGS[name], given.ways, given.rounds, **over)
            ms = {way: max(one[way] for one in found) for way in given.ways}
            rows.append({"ranks": ranks, "layer": name, **ms})
            cells = (f"{time_ms:9.2f} {time_ms / ms[given.ways[0]]:8.2f}" for time_ms in ms.values())
            print(f"{ranks:<6}{name:9}" + "".join(cells), flush=True)
    write(given.json, {"rows": rows, "machine": machine()})
    return 0


def measure(mesh: Mesh, shape: tuple[int, ...], ways: list[str], rounds: int) -> dict[str, float]:
    """Milliseconds of each way on this rank; nothing where it has no part in it."""
    torch.manual_seed(1 + mesh.rank)
    tokens, width = shape[0] // mesh.num_ranks, shape[1]
    x_TD = torch.randn(tokens, width, device=mesh.device, dtype=torch.bfloat16, requires_grad=True)
    steps = {way: step_of(mesh, shape, way, x_TD) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    # NCCL waits in a kernel, which would take multiprocessors from the rank that works
    hosts = dist.new_group(backend="gloo")
    for _ in range(rounds):
        for way, step in steps.items():
            dist.barrier(group=hosts)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times[way].append(1e3 * (time.perf_counter() - begun))
    check(mesh, {way: step for way, step in steps.items() if way != "one"}, x_TD)
    return {way: statistics.median(each) for way, each in times.items()}


def check(mesh: Mesh, steps: dict[str, Callable[[], torch.Tensor]], x_TD: torch.Tensor) -> None:
    """Every way gives the same gradient of the tokens: a time of something else would say nothing."""
    first: torch.Tensor | None = None
    for way, step in steps.items():
        mesh.barrier()
        found = step().double()
        first = found if first is None else first
        error = float((found - first).norm() / first.norm())
        assert error < BOUND, f"{way} differs by {error:.2g}"


def step_of(mesh: Mesh, shape: tuple[int, ...], way: str, x_TD: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Forward and backward of this rank's tokens, warm; gives the gradient of the tokens."""
    tokens, width, hidden, experts, top_k = shape
    alone = way == "one"
    if alone and mesh.rank:
        return lambda: x_TD
    place: dict[str, Any] = {"device": mesh.device} if alone else {"mesh": mesh, "exchange": WAYS[way]}
    moe = MoE(width, hidden, experts, top_k, dtype=torch.bfloat16, **place)
    x_TD = x_TD.detach().repeat(mesh.num_ranks if alone else 1, 1).requires_grad_()
    part = Tokens(mesh=moe.mesh, first=0 if alone else len(x_TD) * mesh.rank, total=tokens)
    d_y, leaves = x_TD.detach().cos(), [x_TD, *moe.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        moe.run(x_TD, part)[0].backward(d_y)

    def gradient() -> torch.Tensor:
        assert x_TD.grad is not None
        return x_TD.grad

    if way not in GRAPHS:
        for _ in range(WARM):
            step()

        def eager() -> torch.Tensor:
            step()
            return gradient()

        return eager
    capture = CudaCapture(mesh.device)
    for _ in range(WARM):
        capture.eagerly(step)
    with mesh.recorder.region():
        graph = capture.capture(step)
    kept = gradient(), step  # a graph has addresses alone: all that `step` reads must stay

    def replayed() -> torch.Tensor:
        graph.replay()
        return kept[0]

    return replayed


if __name__ == "__main__":
    raise SystemExit(main())
