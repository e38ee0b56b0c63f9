"""Two forked ranks that try something for `moeclipse doctor`, and what rank 0 has to say of it.

Hazard: it forks, so it must run before anything opens a CUDA device or computes in threads of a library.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection

from moeclipse.core.errors import CommError
from moeclipse.core.forking import refuse_behind_threads

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


def _rank(task: Task, rank: int, folder: str, sender: Connection) -> None:
    try:
        answer = task(rank, folder)
    except Exception as error:
        answer = (False, str(error).strip().splitlines()[0][:200])
    if rank == 0:
        sender.send_bytes(json.dumps(answer).encode())
