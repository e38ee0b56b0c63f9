"""What `moeclipse doctor` says about NCCL: whether two ranks here can exchange rows with it, and how fast.

Ranks take a GPU each where there are two, and share one over sockets where there is one. Hazard: it forks, so
it must run before anything opens a CUDA device.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Literal

from moeclipse.cli.checks import Finding
from moeclipse.cli.two_ranks import Answer, ask_two_ranks, mesh_of_two

SECTION = "back ends"
PATIENCE_S = 90.0
ROWS = 1024
WIDTH = 256
ROUNDS = 20


def try_nccl(timeout_s: float = PATIENCE_S) -> Answer | None:
    """Whether two ranks exchange rows; None where there is nothing to try."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_nccl_available() or not torch.cuda.device_count():
        return None
    return ask_two_ranks(_exchange, timeout_s)


def _exchange(rank: int, folder: str) -> Answer:
    """An all-to-all, every row checked."""
    import torch

    from moeclipse.comm.async_ops.lane import all_to_all
    from moeclipse.comm.start import stop

    mesh = mesh_of_two(rank, folder, "cuda", PATIENCE_S)
    half = [ROWS // 2] * 2
    rows = torch.full((ROWS, WIDTH), float(rank), device=mesh.device)
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        arrived = all_to_all(mesh.a2a, mesh.experts, rows, half, half, "exchange of rows").get()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    assert arrived[: ROWS // 2].eq(0.0).all(), "rows of rank 0 came changed"
    assert arrived[ROWS // 2 :].eq(1.0).all(), "rows of rank 1 came changed"
    stop()
    where = (
        "two ranks on a GPU each"
        if torch.cuda.device_count() > 1
        else "two ranks that share a GPU, over sockets,"
    )
    travelled = rows.nbytes // 2 >> 10  # the other half stays
    return True, f"{where} sent each other {travelled} KiB in {1e3 * sorted(times)[ROUNDS // 2]:.2f} ms"


def nccl(answer: Answer | None) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch
    import torch.cuda.nccl
    import torch.distributed as dist

    if not dist.is_available():
        return
    if not dist.is_nccl_available():
        yield Finding(
            section=SECTION, name="nccl", state="info", value="not in this torch", advice="CPU only"
        )
    elif answer is None:
        yield Finding(section=SECTION, name="nccl", state="info", value="no device")
    else:
        works, text = answer
        version = ".".join(map(str, torch.cuda.nccl.version()))
        advice = "" if works else "ranks on GPUs cannot talk to each other; NCCL_DEBUG=INFO shows why"
        state: Literal["works", "broken"] = "works" if works else "broken"
        yield Finding(section=SECTION, name="nccl", state=state, value=f"{version}: {text}", advice=advice)
