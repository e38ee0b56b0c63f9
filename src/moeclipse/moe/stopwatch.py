"""Seconds that all ranks take together, and how they tell each other of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moeclipse.comm.flight.exchange import gather_to_host
from moeclipse.comm.mesh import Mesh

REPEATS = 5


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `work`, which all ranks run at the same time."""
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds)[REPEATS // 2]


def slowest(works: list[Callable[[], object]], mesh: Mesh) -> list[float]:
    """Of each work, once tried, what the slowest rank takes; the same on every rank of the stage."""
    seconds = []
    for work in works:
        work()
        tell(mesh, [])
        seconds.append(clock(work, mesh.device))
    return [max(column) for column in zip(*tell(mesh, seconds), strict=True)]


def tell(mesh: Mesh, numbers: list[float]) -> list[list[float]]:
    """Everyone's numbers, on every rank of the stage; without any, a barrier."""
    mine = torch.tensor([*numbers, 0.0], dtype=torch.float64, device=mesh.device)
    return [
        row[:-1] for row in gather_to_host(mesh.a2a, mesh.stage, mine, "exchange of measured costs").get()
    ]
