"""Two forked ranks that try something for a command, and what rank 0 has to say of it.

Hazard: it forks, so it must run before anything opens a CUDA device or computes in threads of a library.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from moeclipse.core.errors import CommError
from moeclipse.core.forking import refuse_behind_threads

if TYPE_CHECKING:
    from moeclipse.comm.mesh import Mesh

Answer = tuple[bool, str]
"""Whether it worked, and how fast or why not."""
Task = Callable[[int, str], Answer]
"""What a rank does, given its number and a folder that both share."""


def ask_two_ranks(task: Task, timeout_s: float) -> Answer:
    try:
        refuse_behind_threads()
    except CommError as error:
        return False, str(error)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="moeclipse-doctor-") as folder:
        receiver, sender = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=_rank, args=(task, rank, folder, sender), daemon=True) for rank in (0, 1)
        ]
        for rank in ranks:
            rank.start()
        sender.close()
        try:
            answered = receiver.poll(timeout_s)
            yes, text = (
                json.loads(receiver.recv_bytes()) if answered else (False, f"no answer in {timeout_s:g} s")
            )
        except EOFError:
            yes, text = False, "a rank ended early"
        for rank in ranks:
            rank.join(2.0)
            if rank.is_alive():
                rank.kill()
                rank.join()
    return yes, text


def mesh_of_two(rank: int, folder: str, kind: str, patience_s: float) -> Mesh:
    """Both ranks meet and share the experts, over gloo or on GPUs over NCCL; collective. `stop` ends it."""
    import torch
    import torch.distributed as dist

    from moeclipse.comm.mesh import Mesh
    from moeclipse.comm.start import Backend, RankPlace, device_settings, start

    place, device = RankPlace(rank=rank, num_ranks=2, local_rank=rank, local_ranks=2), torch.device("cpu")
    backend: Backend = "nccl" if kind == "cuda" else "gloo"
    if kind == "cuda":
        os.environ |= device_settings(place, pp=1, deadline_s=patience_s, backend="nccl")
        device = torch.device("cuda", rank % torch.cuda.device_count())
    store = dist.FileStore(f"{folder}/meet", 2)
    watch = start(place, device=device, deadline_s=patience_s / 2, store=store, backend=backend)
    return Mesh(dp=1, ep=2, rank=rank, device=device, watch=watch)


def _rank(task: Task, rank: int, folder: str, sender: Connection) -> None:
    try:
        answer = task(rank, folder)
    except Exception as error:
        answer = (False, str(error).strip().splitlines()[0][:200])
    if rank == 0:
        sender.send_bytes(json.dumps(answer).encode())
